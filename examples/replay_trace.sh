#!/usr/bin/env bash
# Replay a trace of requests against a server, and report latencies and throughput.
#
#   examples/replay_trace.sh [URL [TRACE]]
#
# A line of a trace is one request: its arrival in ms, its lengths in tokens, and the ids of its prompt's blocks of 512
# tokens. Equal ids are equal blocks, so the prefix cache can be hit. Mooncake's published traces have this format.
# The prompts are random tokens. "pdserve" must be on the PATH: source .venv/bin/activate
set -euo pipefail
url=${1:-http://127.0.0.1:8000}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

curl --silent --fail --output /dev/null "$url/health" || {
  echo "No server is ready at $url. Start one with: make run" >&2
  exit 1
}

# Six requests of two conversations. Each turn begins with the blocks of the turn before.
cat > "$scratch/trace.jsonl" <<'TRACE'
{"timestamp": 0, "input_length": 512, "output_length": 64, "hash_ids": [0]}
{"timestamp": 300, "input_length": 800, "output_length": 96, "hash_ids": [10, 11]}
{"timestamp": 900, "input_length": 1024, "output_length": 64, "hash_ids": [0, 1]}
{"timestamp": 1400, "input_length": 1300, "output_length": 32, "hash_ids": [10, 12, 13]}
{"timestamp": 1800, "input_length": 1536, "output_length": 128, "hash_ids": [0, 1, 2]}
{"timestamp": 2200, "input_length": 1900, "output_length": 64, "hash_ids": [10, 12, 14, 15]}
TRACE

# A quarter of the lengths, so that it takes seconds. --strict: exit with 1 if a request failed.
pdserve bench serve --base-url "$url" --dataset trace --dataset-path "${2:-$scratch/trace.jsonl}" \
  --length-scale 0.25 --strict
