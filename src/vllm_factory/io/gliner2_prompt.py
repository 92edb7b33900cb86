"""From a schema to tasks, and from tasks and words to a prompt (gliner2 2.1.0, ``processor.py``).

A task is written ``( [P] <name and explanations> ( <marker> <child> <marker> <child> ... ) )``. Tasks follow each
other with ``[SEP_STRUCT]`` between; ``[SEP_TEXT]`` ends them. Structures come first, then entities, relations and
classifications. Choices of structures stand as words in front of the text, where the model points at them.

The library's records keep only text, so some things are found again by name there: what a task is called in the
answer, and the options of a field. :class:`Options` looks them up under the same names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np

from vllm_factory.errors import RequestError, shown
from vllm_factory.io.gliner2_request import Classification, Dtype, Schema
from vllm_factory.io.pipeline import Prompt
from vllm_factory.io.tokens import WordTokenizer
from vllm_factory.poolers.gliner2 import ChildKind, TaskKind

DESCRIPTION = " [DESCRIPTION] "
#: Key under which entities are answered, whatever task is called so.
ENTITIES = "entities"
#: Tokens in front of a task and of each child.
MARKERS = ("[P]", "[C]", "[E]", "[R]", "[L]")


class Section(Enum):
    """Part of a schema, by the marker in front of its children."""

    STRUCTURE = "[C]"
    ENTITY = "[E]"
    RELATION = "[R]"
    CLASSIFICATION = "[L]"


@dataclass(frozen=True, slots=True)
class Task:
    """One task of a prompt.

    Attributes:
        section: Where it stands in the schema.
        prompt: Its name and explanations.
        children: What it asks for.
        key: Where the answer goes.
        classification: Its options, if it is a classification.
    """

    section: Section
    prompt: str
    children: list[str]
    key: str
    classification: Classification | None = None

    @property
    def kind(self) -> TaskKind:
        """What the pooler does for it."""
        if self.classification is not None:
            return TaskKind.SIGMOID if _independent(self.classification) else TaskKind.SOFTMAX
        return TaskKind.ENTITIES if self.section is Section.ENTITY else TaskKind.RECORDS

    @property
    def words(self) -> list[str]:
        """How it is written."""
        children = [word for child in self.children for word in (self.section.value, child)]
        return ["(", "[P]", self.prompt, "(", *children, ")", ")"]


class FieldOptions(NamedTuple):
    """What is asked of one child."""

    dtype: Dtype = "list"
    threshold: float | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """Options by the names under which the library keeps them.

    Attributes:
        entities: By entity type.
        fields: By ``structure.field``.
        choices: By ``structure.field``, of fields that have choices.
        relations: Thresholds by relation.
        orders: Names of the children that are answered, by task.
    """

    entities: dict[str, FieldOptions] = field(default_factory=dict)
    fields: dict[str, FieldOptions] = field(default_factory=dict)
    choices: dict[str, list[str]] = field(default_factory=dict)
    relations: dict[str, float | None] = field(default_factory=dict)
    orders: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, schema: Schema) -> Options:
        """Those of a schema."""
        options = cls()
        for name, entity in (schema.entities or {}).items():
            options.entities[name] = FieldOptions(entity.dtype or "list", entity.threshold)
        for name, structure in (schema.structures or {}).items():
            # A field that is there twice keeps its place and takes the later options.
            for each in {each.name: each for each in structure.fields}.values():
                options.fields[f"{name}.{each.name}"] = FieldOptions(each.dtype, each.threshold)
                if each.choices:
                    options.choices[f"{name}.{each.name}"] = each.choices
            options.orders[name] = list(dict.fromkeys(each.name for each in structure.fields))
        for name, relation in (schema.relations or {}).items():
            options.relations[name] = relation.threshold
            options.orders[name] = ["head", "tail"]
        return options

    def child(self, task: Task, name: str) -> FieldOptions:
        """Options of a task's child."""
        if task.key == ENTITIES:
            return self.entities.get(name, FieldOptions())
        if task.section is Section.RELATION:
            return FieldOptions("str", self.relations.get(task.key))
        return self.fields.get(f"{task.key}.{name}", FieldOptions())

    def choices_of(self, task: Task, name: str) -> list[str] | None:
        """The choices of a structure's field, if it has any."""
        if task.key == ENTITIES or task.section is not Section.STRUCTURE:
            return None
        return self.choices.get(f"{task.key}.{name}")


def _independent(options: Classification) -> bool:
    if options.class_act in ("sigmoid", "softmax"):
        return options.class_act == "sigmoid"
    return options.multi_label


def tasks_of(schema: Schema) -> list[Task]:
    """The tasks of a schema, in the order of the prompt.

    Raises:
        RequestError: A classification cannot be told from another one by what the model reads of it.
    """
    return [*_structures(schema), *_entities(schema), *_relations(schema), *_classifications(schema)]


def _task(section: Section, prompt: str, children: list[str]) -> Task:
    return Task(section, prompt, children, prompt.split(DESCRIPTION)[0])


def _described(name: str, descriptions: dict[str, str]) -> str:
    return name + "".join(f"{DESCRIPTION}{child}: {text}" for child, text in descriptions.items())


def _structures(schema: Schema) -> Iterator[Task]:
    for name, structure in (schema.structures or {}).items():
        children = list(dict.fromkeys(each.name for each in structure.fields))
        # Of a field that is there twice, the last description there is counts.
        descriptions = {each.name: each.description for each in structure.fields if each.description}
        yield _task(Section.STRUCTURE, _described(name, descriptions), children)


def _entities(schema: Schema) -> Iterator[Task]:
    if schema.entities:
        descriptions = {
            name: entity.description for name, entity in schema.entities.items() if entity.description is not None
        }
        children = [*schema.entities, *sorted(set(schema.attribute_prompts.values()))]
        yield _task(Section.ENTITY, _described(ENTITIES, descriptions), children)


def _relations(schema: Schema) -> Iterator[Task]:
    for name, relation in (schema.relations or {}).items():
        prompt = f"{name}: {relation.description}" if relation.description else name
        yield _task(Section.RELATION, prompt, ["head", "tail"])


def _classifications(schema: Schema) -> Iterator[Task]:
    classifications = schema.classifications or []
    names = [each.task for each in classifications]
    for index, each in enumerate(classifications):
        prompt = f"{each.task}: {each.prompt}" if each.prompt else each.task
        prompt = _described(prompt, {label: text for label, text in each.labels.items() if text is not None})
        for text, label in each.examples or ():
            if label in each.labels:
                prompt += f" [EXAMPLE] {text} [OUTPUT] {label}"
        # The library finds a task by its name at the beginning of the prompt.
        other = max((name for name in names if _begins(prompt, name)), key=len)
        if other != each.task:
            raise RequestError(
                f"schema.classifications[{index}].task",
                f"{shown(each.task)} with its prompt begins like the task {shown(other)}; rename one of them",
            )
        yield Task(Section.CLASSIFICATION, prompt, list(each.labels), each.task, each)


def _begins(prompt: str, name: str) -> bool:
    return prompt.startswith(name) and prompt[len(name) : len(name) + 1] in ("", ":", " ")


def choice_words(schema: Schema) -> list[str]:
    """The words in front of the text: each structure's fields with choices."""
    words: list[str] = []
    for name, structure in (schema.structures or {}).items():
        fields = {each.name: each.choices for each in structure.fields}
        inner: list[str] = []
        for child, choices in fields.items():
            if choices:
                listed = [word for choice in choices for word in ("|", choice)][1:]
                inner += [",", child, "(", *listed, ")"]
        if inner:
            words += ["(", f"{name}:", *inner[1:], ")"]
    return words


def positions(words: Sequence[str]) -> dict[str, int]:
    """Where each word stands first, in lower case: there a choice is scored, whatever field it belongs to."""
    found: dict[str, int] = {}
    for index, word in enumerate(words):
        found.setdefault(word.lower(), index)
    return found


def _check_markers(task: Task) -> None:
    """With pooled tokens the library takes any marker in a task for one of its own, wherever it stands."""
    for text in (task.prompt, *task.children):
        if any(marker in text for marker in MARKERS):
            raise RequestError("schema", f"{shown(text)} holds one of {', '.join(MARKERS)}; leave it out")


class SchemaPrompt:
    """The part of a prompt in front of the text's words, and what the pooler must know of it.

    Args:
        schema: What to extract.
        threshold: Of spans for which nothing else is said.
        tokenizer: The checkpoint's tokenizer.
        pools_words: Whether the pooler wants all tokens of a word.

    Raises:
        RequestError: Two tasks cannot be told apart, or a name cannot be told from a marker.
    """

    def __init__(self, schema: Schema, threshold: float, tokenizer: WordTokenizer, pools_words: bool) -> None:
        self.tasks = tasks_of(schema)
        self.options = Options.of(schema)
        self.threshold = threshold
        words = choice_words(schema)
        self.positions = positions(words)
        self.pools_words = pools_words
        self._attributes = set(schema.attribute_prompts.values())
        self._token_ids: list[int] = []
        self._prompts: list[int] = []
        self._markers: list[int] = []
        for index, task in enumerate(self.tasks):
            if pools_words:
                _check_markers(task)
            self._write(task.words if index == 0 else ["[SEP_STRUCT]", *task.words], tokenizer, index > 0)
        self._token_ids += tokenizer.encode(["[SEP_TEXT]"])[0]
        self._word_ids = tokenizer.encode(words)
        self._child_arrays = self._children()
        self.num_tokens = len(self._token_ids) + sum(map(len, self._word_ids))

    def _write(self, words: list[str], tokenizer: WordTokenizer, separated: bool) -> None:
        """Append a task's tokens and note where its prompt token and its markers are."""
        first = int(separated)
        for index, ids in enumerate(tokenizer.encode(words)):
            place = index - first
            if place == 1:
                self._prompts.append(len(self._token_ids))
            elif place >= 4 and place % 2 == 0 and index < len(words) - 2:
                self._markers.append(len(self._token_ids))
            self._token_ids += ids

    def _children(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Kind and threshold of each child, and the scores that choices need."""
        kinds: list[ChildKind] = []
        thresholds: list[float] = []
        choices: list[tuple[int, int]] = []
        for task in self.tasks:
            for name in task.children:
                listed = self.options.choices_of(task, name)
                if listed is not None:
                    words = [self.positions[choice.lower()] for choice in listed]
                    choices += [(len(kinds), word) for word in dict.fromkeys(words)]
                kinds.append(self._child_kind(task, name, listed))
                own = self.options.child(task, name).threshold
                thresholds.append(self.threshold if own is None else own)
        return (
            np.array(kinds, np.uint8),
            np.array(thresholds, np.float32),
            np.array(choices, np.int32).reshape(-1),
        )

    def _child_kind(self, task: Task, name: str, choices: list[str] | None) -> ChildKind:
        if choices is not None:
            return ChildKind.CHOICES
        if task.section is Section.ENTITY and name in self._attributes:
            return ChildKind.ATTRIBUTE
        return ChildKind.SPANS

    def prompt(self, text_ids: Sequence[tuple[int, ...]]) -> Prompt:
        """The prompt for a text whose words have these tokens."""
        token_ids = list(self._token_ids)
        words = []
        for ids in (*self._word_ids, *text_ids):
            # With pooled tokens the library leaves out words that have none.
            if ids or not self.pools_words:
                words.append(len(token_ids))
            token_ids += ids
        if self.pools_words:
            text_start = max(len(words) - len(text_ids), 0)
            words.append(len(token_ids))
        else:
            text_start = len(self._word_ids)
            # A last word without tokens stands for the prompt's last token.
            words = [min(word, len(token_ids) - 1) for word in words]
        kinds, thresholds, choices = self._child_arrays
        arrays = (
            np.array(self._prompts, np.int32),
            np.array([task.kind for task in self.tasks], np.uint8),
            np.array([len(task.children) for task in self.tasks], np.int32),
            np.array(self._markers, np.int32),
            kinds,
            thresholds,
            choices,
            np.array(words, np.int32),
            np.array([text_start], np.int32),
        )
        return Prompt(token_ids, arrays)
