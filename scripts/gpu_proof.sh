#!/usr/bin/env bash
# Everything that needs a GPU, in one go: the marked tests, then the benchmark in both precisions.
#
#     scripts/gpu_proof.sh OUTPUT_DIR
#
# Needs: vLLM for the GPU, this package (with its metadata), gliner, pytest, httpx, aiohttp, py-spy.
set -uo pipefail
out=${1:?usage: scripts/gpu_proof.sh OUTPUT_DIR}
mkdir -p "$out"
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 PYTHONUNBUFFERED=1
status=0
python3 -m pytest -q -m gpu tests/gpu -p no:cacheprovider 2>&1 | tee "$out/tests.log" | tail -25 || status=1
export VLLM_ENABLE_V1_MULTIPROCESSING=1
for dtype in float32 bfloat16; do
    python3 -m bench --size large --dtype "$dtype" --requests 128 --profile 8 \
        --checkpoint "${TMPDIR:-/tmp}/gliner-large" \
        --output "$out/gliner-large-$dtype.json" > "$out/bench-$dtype.log" 2>&1 || status=1
    tail -25 "$out/bench-$dtype.log"
done
exit $status
