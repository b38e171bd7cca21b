#!/usr/bin/env bash
# Stream an answer of POST /generate with curl.
#
#   examples/stream_with_curl.sh [URL]
#
# The server sends server-sent events: a line "data: {...}" for each token, and "data: [DONE]" at the end.
set -euo pipefail
url=${1:-http://127.0.0.1:8000}

curl --silent --fail --output /dev/null "$url/health" || {
  echo "No server is ready at $url. Start one with: make run" >&2
  exit 1
}

# --no-buffer shows each event when it arrives. With "incremental", an event has the new text only.
curl --silent --show-error --fail-with-body --no-buffer "$url/generate" -d '{
  "text": "The capital of France is",
  "sampling_params": {"temperature": 0, "max_new_tokens": 16},
  "stream": true,
  "incremental": true
}'
