#!/usr/bin/env bash
# What `make demo` does: a cluster of 1 prefill, 1 decode and a router on this host, one answer streamed by curl, where
# its time went, and everything stopped again. The exit code is 0 only if all of it worked.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly START_SECONDS=300
readonly BODY='{
  "text": "<|im_start|>user\nExplain in three sentences why the sky is blue.<|im_end|>\n<|im_start|>assistant\n",
  "sampling_params": {"temperature": 0, "max_new_tokens": 128},
  "stream": true
}'
# The command line, as a process that ends with this script, whatever happens to the script.
readonly TETHERED='
import pdserve.runtime.clean_start
import sys
from pdserve.runtime.child import die_with_parent
from pdserve.server.cli import main
die_with_parent(int(sys.argv.pop(1)))
main()
'

fail() {
  echo "demo: $1" >&2
  tail -n 25 "$scratch"/*.log >&2 || true
  exit 1
}

# Whatever ends this script stops the cluster. A cluster that doesn't stop cleanly spoils the exit code.
stop() {
  local status=$?
  trap - EXIT
  trap '' INT TERM HUP
  if [[ -n $cluster ]]; then
    kill -TERM "$cluster" 2>/dev/null || true
    wait "$cluster" || { echo "demo: the cluster ended with exit code $?" >&2; status=$((status ? status : 1)); }
  fi
  rm -rf "$scratch"
  exit "$status"
}

command -v curl >/dev/null || { echo "demo: curl is missing; install it, it is the demo's client" >&2; exit 1; }
scratch=$(mktemp -d)
cluster=""
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

port=$(.venv/bin/python -P -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
url=http://127.0.0.1:$port

echo "\$ pdserve up --prefill 1 --decode 1 --port $port"
.venv/bin/python -P -c "$TETHERED" $$ up --prefill=1 --decode=1 "--port=$port" "--log-dir=$scratch" \
  </dev/null >"$scratch/summary" 2>"$scratch/up.log" &
cluster=$!
deadline=$((SECONDS + START_SECONDS))
until curl --silent --fail --max-time 2 --output /dev/null "$url/health"; do
  kill -0 "$cluster" 2>/dev/null || fail "the cluster did not start"
  ((SECONDS < deadline)) || fail "the cluster is not healthy after $START_SECONDS s"
  sleep 0.2
done
echo "  healthy after $SECONDS s"

printf '\n$ curl -N %s/generate -d '\''%s'\''\n\n' "$url" "$BODY"
curl --silent --show-error --no-buffer --fail-with-body --max-time 300 "$url/generate" -d "$BODY" |
  .venv/bin/python .ci/show_answer.py || fail "there was no proper answer"

printf '\nStopping. "make run" keeps such a cluster up.\n'
