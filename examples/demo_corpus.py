"""Generated, annotated sentences for the demonstration GLiNER model.

Everything is drawn from one seeded random source: the templates in ``demo_data`` are filled with names made
by Faker, with the word lists in ``demo_data/words.txt`` and with invented names. Invented names matter most:
a model that has only ever seen "Siemens" learns the word, one that meets a new brand in every sentence has
to learn the context.

Training and held-out material are kept apart twice: by template (two files) and by name (see ``Lexicon``).
"""

import random
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NotRequired, TypedDict

from faker import Faker
from gliner.data_processing import WordsSplitter

DATA_DIR: Final = Path(__file__).parent / "demo_data"
_ALTERNATIVES = re.compile(r"\[([^\[\]]*\|[^\[\]]*)\]")
_PLAIN_WORD = re.compile(r"(?<!['\w.])[A-Za-z][a-z]+(?![\w.])")
_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class EntityType:
    """One entity type: the kinds of slot it covers and the phrasings a user may ask for it with.

    ``broad`` phrasings cover every kind of the type; each ``narrow`` phrasing covers the kinds it names, so
    that "city" is answered with Berlin but not with Germany.
    """

    name: str
    kinds: frozenset[str]
    broad: tuple[str, ...]
    narrow: tuple[tuple[str, frozenset[str]], ...] = ()


def _narrow(**phrases: str) -> tuple[tuple[str, frozenset[str]], ...]:
    """Turn ``kind="a|b"`` into one (phrasing, {kind}) pair for each phrasing."""
    return tuple((text, frozenset({kind})) for kind, texts in phrases.items() for text in texts.split("|"))


ENTITY_TYPES: Final = (
    EntityType(
        "person",
        frozenset({"person"}),
        (
            "person",
            "people",
            "name",
            "human",
            "person name",
            "persons",
            "individual",
            "name of a person",
            "per",
        ),
    ),
    EntityType(
        "organization",
        frozenset({"company", "institution"}),
        (
            "organization",
            "organisation",
            "org",
            "organizations",
            "organization name",
            "institution or company",
        ),
        _narrow(
            company="company|business|companies|firm|company name|corporation|company|company",
            institution="institution|public institution|non-profit organization",
        ),
    ),
    EntityType(
        "location",
        frozenset({"city", "country", "region", "address"}),
        ("location", "place", "locations", "places", "loc", "geographic location", "place name"),
        _narrow(
            city="city|town|cities|city name",
            country="country|nation|countries",
            region="region|state or region",
            address="address|street|street address",
        ),
    ),
    EntityType(
        "date",
        frozenset({"date"}),
        ("date", "day", "dates", "calendar date", "date expression", "year or date"),
    ),
    EntityType("time", frozenset({"time"}), ("clock time", "time of day", "hour of the day")),
    EntityType("event", frozenset({"event"}), ("event", "events", "event name", "happening", "named event")),
    EntityType(
        "product",
        frozenset({"product"}),
        ("product", "products", "product name", "item", "device or product"),
    ),
    EntityType(
        "money",
        frozenset({"money"}),
        ("money", "amount of money", "price", "monetary value", "amount", "sum"),
    ),
)
WHEN: Final = EntityType("when", frozenset({"date", "time"}), ("time", "date or time", "temporal expression"))


@dataclass(frozen=True)
class Piece:
    """A stretch of text; ``kind`` is ``None`` for text outside any entity."""

    text: str
    kind: str | None = None


@dataclass(frozen=True)
class Entity:
    """An annotated character span; ``end`` is exclusive."""

    start: int
    end: int
    kind: str


@dataclass(frozen=True)
class Sentence:
    """A generated text with its entities."""

    text: str
    entities: tuple[Entity, ...]


class GlinerExample(TypedDict):
    """One training example in the form that gliner's data collator reads (``end`` is inclusive)."""

    tokenized_text: list[str]
    ner: list[tuple[int, int, str]]
    ner_labels: NotRequired[list[str]]


def read_templates(name: str) -> tuple[str, ...]:
    """Read the templates of ``demo_data/<name>``, without comments and blank lines."""
    lines = (DATA_DIR / name).read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


def read_words() -> dict[str, tuple[str, ...]]:
    """Read ``demo_data/words.txt`` into one tuple of values for each section."""
    body = (DATA_DIR / "words.txt").read_text(encoding="utf-8")
    sections = re.split(r"^\[([\w.]+)\]$", body, flags=re.MULTILINE)[1:]
    values = (
        tuple(v.strip() for v in text.replace("\n", " ").split(" | ") if v.strip()) for text in sections[1::2]
    )
    return dict(zip(sections[0::2], values, strict=True))


def is_held_out(value: str) -> bool:
    """Say whether a name belongs to the held-out set; a hash, so that the answer needs no state."""
    return zlib.crc32(value.lower().encode()) % 5 == 0


class Lexicon:
    """Name pools and slot values of one half of the data.

    Faker's names, invented names and compound brands are divided by a hash of the name, so that the held-out
    half is made of names which training never saw. The curated lists (well-known firms, cities, ...) are used
    in training only: with them the small model knows the everyday cases, and without them the held-out score
    does not profit from memory.
    """

    def __init__(self, rng: random.Random, faker_seed: int, *, held_out: bool, pool_size: int = 240) -> None:
        self.rng = rng
        self.held_out = held_out
        self.words = read_words()
        fakers = [self._faker(locale, faker_seed + i) for i, locale in enumerate(self.words["locales"])]
        self.first_names = self._pool(fakers, lambda f: f.first_name(), pool_size)
        self.last_names = self._pool(fakers, lambda f: f.last_name(), pool_size)
        self.cities = self._pool(fakers, lambda f: f.city(), pool_size)
        self.companies = self._pool(fakers, lambda f: f.company(), pool_size // 2)
        self.addresses = self._pool(fakers, lambda f: f.street_address(), pool_size // 2)
        self.countries = self._pool(fakers[:1], lambda f: f.country(), pool_size * 2)
        self.regions = self._pool(fakers[:1], lambda f: f.state(), pool_size)
        self.common_words = tuple(sorted({fakers[0].word() for _ in range(pool_size * 20)}))
        self.slots = self._slots()

    @staticmethod
    def _faker(locale: str, seed: int) -> Faker:
        fake = Faker(locale, use_weighting=False)
        fake.seed_instance(seed)
        return fake

    def _pool(self, fakers: Sequence[Faker], make: Callable[[Faker], str], size: int) -> tuple[str, ...]:
        """Draw ``size`` names from each locale and keep this half's; sorted, as sets have no stable order."""
        drawn = {make(fake) for fake in fakers for _ in range(size)}
        return tuple(sorted(name for name in drawn if self._usable(name)))

    def _usable(self, name: str) -> bool:
        plain = not re.search(r"[(){}\[\]\n\d]{2,}|[()\n]|[\u0370-\uffff]", name.replace(" ", "x"))
        return plain and 1 < len(name) < 40 and len(name.split()) <= 5 and is_held_out(name) == self.held_out

    def _slots(self) -> dict[str, Callable[[], list[Piece]]]:
        """Map each slot name to the function that fills it."""
        slots: dict[str, Callable[[], list[Piece]]] = {
            "person": self.person,
            "first": lambda: [Piece(self.pick(self.first_names), "person")],
            "company": lambda: self.named(self.company(), "company"),
            "institution": lambda: self.named(self.institution(), "institution"),
            "org": lambda: self.fill("company" if self.chance(0.6) else "institution"),
            "city": lambda: self.named(self.city(), "city"),
            "country": lambda: self.named(self.country(), "country"),
            "region": lambda: self.named(self.region(), "region"),
            "address": lambda: [Piece(self.address(), "address")],
            "place": lambda: self.fill(self.rng.choices(("city", "region", "country"), (6, 2, 2))[0]),
            "event": lambda: self.named(self.event(), "event"),
            "product": lambda: self.named(self.product(), "product"),
            "money": lambda: [Piece(self.money(), "money")],
            "time": lambda: [Piece(self.time(), "time")],
            "number": lambda: [Piece(self.number())],
            "word": lambda: [Piece(self.pick(self.common_words))],
            "words": lambda: [
                Piece(" ".join(self.rng.choices(self.common_words, k=self.rng.choice((2, 3, 4, 6)))))
            ],
        }
        slots |= self._date_slots()
        for name in ("role", "nationality", "goods", "document", "subject"):
            slots[name] = lambda name=name: [Piece(self.word(f"filler.{name}"))]  # type: ignore[misc]
        return slots

    def _date_slots(self) -> dict[str, Callable[[], list[Piece]]]:
        """The date slots; they differ in the words around the date, which stay outside the entity."""
        return {
            "date_on": self.date_on,
            "date_on_cap": lambda: _capitalised(self.date_on()),
            "date_rel": lambda: [Piece(self.relative_date(), "date")],
            "date_in": self.date_in,
            "date_in_cap": lambda: _capitalised(self.date_in()),
            "date_in_bare": lambda: self.date_in()[-1:],
            "date_bare": lambda: [Piece(self.full_date() if self.chance(0.7) else self.short_date(), "date")],
            "date_full": lambda: [Piece(self.full_date(), "date")],
            "date_year": lambda: [Piece(self.year(), "date")],
            "date_season": lambda: [Piece(self.season(), "date")],
            "date_season_in": lambda: [Piece("in "), Piece(self.season(), "date")],
        }

    def fill(self, slot: str) -> list[Piece]:
        """Fill one slot."""
        return self.slots[slot]()

    def pick(self, values: Sequence[str]) -> str:
        """Choose one value."""
        return self.rng.choice(values)

    def word(self, section: str) -> str:
        """Choose one value of a word list."""
        return self.rng.choice(self.words[section])

    def chance(self, probability: float) -> bool:
        """Return ``True`` with the given probability."""
        return self.rng.random() < probability

    def famous(self, section: str, probability: float) -> str | None:
        """Sometimes give a curated name, but never in the held-out half."""
        return self.word(section) if not self.held_out and self.chance(probability) else None

    def named(self, name: str, kind: str) -> list[Piece]:
        """Annotate a name; an article in front of it ("the Alps") stays outside the entity."""
        return [Piece("the "), Piece(name[4:], kind)] if name.startswith("the ") else [Piece(name, kind)]

    def invented(self) -> str:
        """Make up a capitalised word such as "Kalbermann" that belongs to this half."""
        while True:
            middle = "".join(self.word("syllable_middles") for _ in range(self.rng.choice((0, 0, 1, 1, 2))))
            name = (self.word("syllable_starts") + middle + self.word("syllable_ends")).capitalize()
            if is_held_out(name) == self.held_out and len(name) > 3:
                return name

    def plain_word(self) -> str:
        """Choose a common English word, or make up one that looks English; never an entity."""
        if self.chance(0.7):
            return self.pick(self.common_words)
        stem = self.word("syllable_starts") + self.word("syllable_middles")
        return stem + self.word("word_endings")

    def brand(self) -> str:
        """Make up a brand of two English parts ("Brightleaf", sometimes "BrightLeaf")."""
        while True:
            tail = self.word("brand_tails")
            name = self.word("brand_heads") + (tail.capitalize() if self.chance(0.25) else tail)
            if is_held_out(name) == self.held_out:
                return name

    def last_name(self) -> str:
        """A surname, one in six of them invented."""
        if self.chance(0.02):
            return "O'" + self.invented()
        return self.invented() if self.chance(0.16) else self.pick(self.last_names)

    def person(self) -> list[Piece]:
        """A person; a title in front ("Dr. ") is not part of the entity."""
        titled = self.chance(0.12)
        title = [Piece(self.word("titles") + " ")] if titled else []
        return [*title, Piece(self._person_name(bare_ok=titled), "person")]

    def _person_name(self, *, bare_ok: bool) -> str:
        first = self.invented() if self.chance(0.05) else self.pick(self.first_names)
        last = self.last_name()
        if self.chance(0.6 if bare_ok else 0.12):
            return last
        initial = self.pick("ABCDEFGHJKLMPRST")
        forms = (
            f"{first} {last}",
            first,
            f"{first[0]}. {last}",
            f"{first} {initial}. {last}",
            f"{first} {last} {self.last_name()}",
        )
        return self.rng.choices(forms, (84, 6, 4, 5, 1))[0]

    def company(self) -> str:
        """A firm: well-known, from Faker, or built from an invented root, a sector and a legal form."""
        known = self.famous("famous_companies", 0.28)
        if known:
            return f"{known} {self.word('company_suffixes')}" if self.chance(0.1) else known
        if self.chance(0.22):
            return self.pick(self.companies)
        makers = (self.invented, self.brand, self.last_name, self._initials, self.city)
        parts = [self.rng.choices(makers, (40, 26, 20, 8, 6))[0]()]
        if self.chance(0.45):
            parts.append(self.word("company_sectors"))
        if self.chance(0.35):
            parts.append(self.word("company_suffixes"))
        return " ".join(parts)

    def _initials(self) -> str:
        return "".join(self.rng.choices("ABCDEFGHIKLMNPRSTVWXZ", k=self.rng.choice((2, 3, 3, 4))))

    def institution(self) -> str:
        """A university, council, hospital, ministry and the like."""
        known = self.famous("world_bodies", 0.4)
        if not known and self.chance(0.1):
            return "the " + self.invented()
        return known or self.word("institution_forms").format(x=self.rng.choice((self.city, self.last_name))())

    def city(self) -> str:
        """A town: well-known, from Faker or invented."""
        known = self.famous("famous_cities", 0.4)
        if known:
            return known
        if self.chance(0.68):
            return self.pick(self.cities)
        prefix = self.rng.choice(("", "", "", "", "New ", "San ", "Port ", "St. ", "Bad ", "El ", "North "))
        return prefix + self.invented()

    def country(self) -> str:
        """A country name."""
        return self.famous("countries", 0.6) or self.pick(self.countries)

    def region(self) -> str:
        """A region or state; Faker's US states stand in for unknown ones."""
        return self.famous("regions", 0.6) or (
            self.invented() + "ia" if self.chance(0.2) else self.pick(self.regions)
        )

    def address(self) -> str:
        """A street, mostly with a house number."""
        if self.chance(0.3):
            return self.pick(self.addresses)
        name = self.rng.choice((self.last_name, self.invented, self.city, lambda: self.word("brand_heads")))()
        return self.word("street_forms").format(n=self.rng.randint(1, 250), x=name)

    def event(self) -> str:
        """A named event, some with a year or an ordinal."""
        known = self.famous("famous_events", 0.3)
        name = known or self.word("event_forms").format(x=self.rng.choice((self.city, self.invented, self.brand))())
        if self.chance(0.2):
            return f"{name} {self.year()}"
        return f"{self.year()} {name}" if self.chance(0.06) else name

    def product(self) -> str:
        """A product such as "Nova 300", "Zorka Pro" or "iPhone 13"."""
        known = self.famous("famous_products", 0.25)
        if known:
            return known
        parts = [self.rng.choice((self.invented, self.brand))()]
        if self.chance(0.5):
            parts.append(self.word("product_suffixes"))
        if self.chance(0.5) or len(parts) == 1:
            model = str(self.rng.choice((*range(2, 20), 100, 200, 300, 500, 750, 2000, 3000)))
            parts.append(self.rng.choice(("", "", "X", "S", "T")) + model)
        return " ".join(parts)

    def money(self) -> str:
        """An amount with its currency, in several notations."""
        number = self.rng.choice(
            (f"{self.rng.randint(1, 990)}", f"{self.rng.uniform(1, 99):.1f}", self._thousands())
        )
        scale = self.rng.choice(("", "", "", " million", " billion", "m"))
        form = self.rng.choice(
            ("${}", "€{}", "£{}", "{} euros", "{} dollars", "{} €", "USD {}", "EUR {}", "CHF {}")
        )
        return form.format(number + scale)

    def _thousands(self) -> str:
        return f"{self.rng.randint(1000, 990000):,}"

    def number(self) -> str:
        """A number that is no entity."""
        return self.rng.choice(
            (str(self.rng.randint(2, 99)), str(self.rng.randint(100, 9000)), "two", "three", "five")
        )

    def time(self) -> str:
        """A time of day."""
        hour, minute = self.rng.randint(1, 12), self.rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50))
        forms = (
            f"{hour}:{minute:02d} {self.rng.choice(('am', 'pm', 'a.m.', 'p.m.'))}",
            f"{hour + 11}:{minute:02d}",
            f"{hour} o'clock",
            f"{hour}{self.rng.choice(('am', 'pm', ' p.m.'))}",
            self.rng.choice(("noon", "midnight", "half past six", "quarter to nine")),
        )
        return self.rng.choice(forms)

    def year(self) -> str:
        """A year, mostly a recent one."""
        return str(self.rng.randint(1985, 2030) if self.chance(0.65) else self.rng.randint(1700, 1990))

    def month(self) -> str:
        """A month, sometimes abbreviated."""
        name = self.word("months")
        return name[:3] + self.rng.choice(("", ".")) if self.chance(0.12) and len(name) > 4 else name

    def full_date(self) -> str:
        """A date with day, month and year in one of many notations."""
        day, month, year = self.rng.randint(1, 28), self.rng.randint(1, 12), self.year()
        name = self.month()
        worded = (f"{day} {name} {year}", f"{name} {day}, {year}")
        numeric = (
            f"{year}-{month:02d}-{day:02d}",
            f"{day:02d}.{month:02d}.{year}",
            f"{day:02d}/{month:02d}/{year}",
        )
        others = (
            f"{_ordinal(day)} {name} {year}",
            f"{_ordinal(day)} of {name} {year}",
            f"{name} {_ordinal(day)}, {year}",
            f"{day}. {name} {year}",
            f"{month}/{day}/{year}",
            f"{day:02d}-{month:02d}-{year}",
            f"{self.word('weekdays')}, {self.rng.choice(worded)}",
        )
        forms = (*worded, *worded, *numeric, *others)
        return self.rng.choice(forms)

    def short_date(self) -> str:
        """A date without a year."""
        day, name, weekday = self.rng.randint(1, 28), self.month(), self.word("weekdays")
        forms = (
            weekday,
            weekday,
            f"{day} {name}",
            f"{name} {day}",
            f"{_ordinal(day)} {name}",
            f"{_ordinal(day)} of {name}",
            f"{name} {_ordinal(day)}",
            f"{weekday}, {day} {name}",
            f"{weekday} {day} {name}",
        )
        return self.rng.choice(forms)

    def relative_date(self) -> str:
        """A date relative to today, such as "last Friday"."""
        if self.chance(0.35):
            day_or_month = self.word(self.rng.choice(("weekdays", "months")))
            return f"{self.rng.choice(('last', 'next', 'this'))} {day_or_month}"
        return self.word("relative_dates")

    def season(self) -> str:
        """A season, with or without a year."""
        season = self.word("seasons")
        return self.rng.choice((season, f"{season} {self.year()}", f"early {season}", f"{season} of {self.year()}"))

    def date_on(self) -> list[Piece]:
        """A day with its preposition, or a relative date that needs none."""
        form = self.rng.random()
        if form < 0.25:
            return [Piece(self.relative_date(), "date")]
        if form < 0.45:
            return [Piece("on "), Piece(self.word("weekdays"), "date")]
        return [Piece("on "), Piece(self.full_date() if form < 0.8 else self.short_date(), "date")]

    def date_in(self) -> list[Piece]:
        """A year, month, decade or season with the preposition "in"."""
        form = self.rng.random()
        if form < 0.4:
            return [Piece("in "), Piece(self.year(), "date")]
        if form < 0.8:
            return [Piece("in "), Piece(f"{self.month()} {self.year()}", "date")]
        if form < 0.88:
            return [Piece("in the "), Piece(f"{self.year()[:3]}0s", "date")]
        return (
            [Piece("in the "), Piece(self.season(), "date")]
            if form < 0.95
            else [Piece("in "), Piece(self.word("months"), "date")]
        )


def _ordinal(day: int) -> str:
    suffix = "th" if 10 < day < 14 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{suffix}"


def _capitalised(pieces: list[Piece]) -> list[Piece]:
    """Capitalise the first letter, whatever piece it is in."""
    first = pieces[0]
    return [Piece(first.text[:1].upper() + first.text[1:], first.kind), *pieces[1:]]


class SentenceMaker:
    """Fills templates and roughens the result the way real text is rough."""

    def __init__(self, seed: int, *, held_out: bool) -> None:
        self.rng = random.Random(seed)
        self.lexicon = Lexicon(self.rng, seed, held_out=held_out)
        self.templates = read_templates("held_out_templates.txt" if held_out else "train_templates.txt")
        self._deck: list[str] = []

    def make(self) -> Sentence:
        """Make one text of one to three sentences."""
        pieces = self._clause()
        form = self.rng.random()
        if form < 0.08:
            pieces = [Piece(self.lexicon.word("leads") + " "), *_uncapitalised(pieces)]
        elif form < 0.16:
            pieces = [
                *_without_stop(pieces),
                Piece(self._connector()),
                *_uncapitalised(self._clause()),
            ]
        elif form < 0.28:
            pieces = [*pieces, Piece(" "), *self._clause()]
        elif form < 0.295:
            pieces = [*pieces, Piece(" "), *self._clause(), Piece(" "), *self._clause()]
        if not self.lexicon.held_out:
            pieces = self._with_strange_words(pieces)
        return _join(self._roughen(pieces))

    def _with_strange_words(self, pieces: list[Piece]) -> list[Piece]:
        """Swap words around the entities for random ones, in training only.

        Without this the model learns the templates by heart: it scores 0.95 on new names in known templates
        and half of that in unknown ones, where it takes every new word for a name.
        """
        rate = self.rng.choice((0.0, 0.0, 0.1, 0.2, 0.3, 0.4))

        def swap(match: re.Match[str]) -> str:
            if self.rng.random() >= rate:
                return match[0]
            word = self.lexicon.plain_word()
            word = word.capitalize() if match[0][0].isupper() else word
            return f"{word} {match[0].lower()}" if self.rng.random() < 0.25 else word

        return [p if p.kind else Piece(_PLAIN_WORD.sub(swap, p.text)) for p in pieces]

    def _connector(self) -> str:
        words = self.lexicon.word("connectors")
        return f" {words} " if words[0].isalpha() or words == "-" else f"{words} "

    def _clause(self) -> list[Piece]:
        """Fill the next template; a shuffled deck uses all templates equally often."""
        if not self._deck:
            self._deck = self.rng.sample(self.templates, len(self.templates))
        template = _ALTERNATIVES.sub(lambda m: self.rng.choice(m[1].split("|")), self._deck.pop())
        parts = _SLOT.split(template)
        pieces: list[Piece] = []
        for i, part in enumerate(parts):
            pieces += self.lexicon.fill(part) if i % 2 else [Piece(part)]
        filled = [piece for piece in pieces if piece.text]
        # An article or a preposition out of a slot needs a capital here; names are written as they are.
        return _capitalised(filled) if template.startswith("{") and filled[0].kind is None else filled

    def _roughen(self, pieces: list[Piece]) -> list[Piece]:
        """Now and then lose the full stop, the capitals or the straight apostrophes."""
        if self.rng.random() < 0.1:
            pieces = _without_stop(pieces)
        form = self.rng.random()
        if form < 0.07:
            return [Piece(piece.text.lower(), piece.kind) for piece in pieces]
        if form < 0.1:
            return [Piece(piece.text.upper(), piece.kind) for piece in pieces]
        return [Piece(piece.text.replace("'", "\u2019"), piece.kind) for piece in pieces] if form < 0.2 else pieces


def _uncapitalised(pieces: list[Piece]) -> list[Piece]:
    """Lower the first letter of a clause that now stands inside a sentence, unless it starts with a name."""
    first = pieces[0]
    if first.kind is not None or not re.match(r"[A-Z][a-z]+ ", first.text):
        return pieces
    return [Piece(first.text[0].lower() + first.text[1:]), *pieces[1:]]


def _without_stop(pieces: list[Piece]) -> list[Piece]:
    """Drop a full stop at the end, unless it belongs to a name."""
    last = pieces[-1]
    return [*pieces[:-1], Piece(last.text.rstrip("."))] if last.kind is None else pieces


def _join(pieces: Iterable[Piece]) -> Sentence:
    """Concatenate pieces, keep the spans, and write one full stop where "Inc." ends a sentence."""
    text = ""
    entities: list[Entity] = []
    for piece in pieces:
        added = piece.text[1:] if text.endswith(".") and piece.text.startswith(".") else piece.text
        if piece.kind is not None:
            entities.append(Entity(len(text), len(text) + len(added), piece.kind))
        text += added
    return Sentence(text, tuple(entities))


def make_sentences(seed: int, count: int, *, held_out: bool = False) -> list[Sentence]:
    """Generate ``count`` texts; the same arguments give the same texts."""
    maker = SentenceMaker(seed, held_out=held_out)
    return [maker.make() for _ in range(count)]


class LabelSampler:
    """Chooses, sentence by sentence, which labels are asked for and how they are worded."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.unrelated = read_words()["unrelated_labels"]

    def training_labels(self, sentence: Sentence) -> dict[str, frozenset[str]]:
        """Draw labels (phrasing -> kinds): most that match, some that do not, some that never match."""
        present = {entity.kind for entity in sentence.entities}
        chosen: dict[str, frozenset[str]] = {}
        for entity_type in self._types():
            if self.rng.random() < (0.85 if entity_type.kinds & present else 0.4):
                chosen |= self._phrasings(entity_type, present)
        for label in self.rng.sample(self.unrelated, self.rng.choice((0, 0, 1, 1, 2))):
            chosen[label] = frozenset()
        chosen = chosen or {"person": frozenset({"person"})}
        return {self._cased(label): chosen[label] for label in self.rng.sample(sorted(chosen), len(chosen))}

    def _types(self) -> tuple[EntityType, ...]:
        """All types; in one of eight cases one type for everything temporal."""
        if self.rng.random() > 0.12:
            return ENTITY_TYPES
        return (*(t for t in ENTITY_TYPES if not t.kinds & WHEN.kinds), WHEN)

    def _phrasings(self, entity_type: EntityType, present: set[str]) -> dict[str, frozenset[str]]:
        """One broad phrasing, or narrow ones for some kinds (favouring kinds that occur)."""
        if not entity_type.narrow or self.rng.random() < 0.5:
            return {self.rng.choice(entity_type.broad): entity_type.kinds}
        chosen: dict[str, frozenset[str]] = {}
        for kind in sorted(entity_type.kinds):
            if self.rng.random() < (0.8 if kind in present else 0.3):
                chosen |= dict([self.rng.choice([n for n in entity_type.narrow if n[1] == {kind}])])
        return chosen

    def _cased(self, label: str) -> str:
        form = self.rng.random()
        return label.capitalize() if form < 0.08 else label.upper() if form < 0.12 else label

    def broad_labels(self) -> dict[str, EntityType]:
        """One broad phrasing for each type, in random order: what the held-out set is asked with."""
        types = self.rng.sample(ENTITY_TYPES, len(ENTITY_TYPES))
        return {self.rng.choice(entity_type.broad): entity_type for entity_type in types}


def to_gliner(sentence: Sentence, labels: dict[str, frozenset[str]], splitter: WordsSplitter) -> GlinerExample:
    """Turn character spans into word spans of gliner's splitter, one entry for each matching label."""
    words = list(splitter(sentence.text))
    starts = {start: i for i, (_, start, _) in enumerate(words)}
    ends = {end: i for i, (_, _, end) in enumerate(words)}
    ner = [
        (starts[entity.start], ends[entity.end], label)
        for entity in sentence.entities
        for label, kinds in labels.items()
        if entity.kind in kinds and entity.start in starts and entity.end in ends
    ]
    return {"tokenized_text": [word for word, _, _ in words], "ner": ner, "ner_labels": list(labels)}
