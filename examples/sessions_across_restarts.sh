#!/usr/bin/env bash
# Save a long prompt as a session, kill the server, start it again, and get the answer without computing the prompt anew.
#
#   examples/sessions_across_restarts.sh [OPTIONS]
#
# OPTIONS go to the server, for example --model-path FILE.
# "pdserve" must be on the PATH: source .venv/bin/activate
set -euo pipefail
port=${PORT:-30000}
url=http://127.0.0.1:$port
if curl --silent --output /dev/null "$url/health"; then
  echo "Port $port is in use. Choose another one: PORT=30009 $0" >&2
  exit 1
fi
data=$(mktemp -d)
trap 'kill $(jobs -p) 2> /dev/null || true; wait; rm -rf "$data"' EXIT

# Sessions are files in one folder, and their KV cache is in another.
start_server() {
  pdserve server --port "$port" --kv-sessions-dir "$data/sessions" --enable-hierarchical-cache \
    --hicache-storage-backend file --hicache-storage-url "$data/kv" "$@" &> "$data/server.log" &
  server=$!
  until curl --silent --fail --output /dev/null "$url/health"; do
    kill -0 "$server" 2> /dev/null || { echo "The server did not start:" >&2; tail "$data/server.log" >&2; exit 1; }
    sleep 0.2
  done
  echo "The server is healthy at port $port."
}

# POST the JSON of $2 to the path $1, and print the answer.
post() {
  curl --silent --show-error --fail-with-body "$url$1" -d "$2"
  echo
}

start_server "$@"
document=$(printf 'The capital of France is Paris, and that of Italy is Rome. %.0s' {1..40})
echo "Save the session:"
post /kv/snapshot '{
  "name": "report",
  "messages": [{"role": "user", "content": "'"$document"' What is the capital of France?"}],
  "sampling_params": {"temperature": 0, "max_new_tokens": 32}
}'

kill -KILL "$server"
wait "$server" 2> /dev/null || echo "The server was killed."
# Its other processes end a moment later and free the port.
while curl --silent --output /dev/null "$url/health"; do sleep 0.1; done
start_server "$@"
echo "Restore the session. \"cached_tokens\" in the answer were not computed again:"
post /kv/restore '{"name": "report", "resume": true}'

kill -TERM "$server"
wait "$server"
echo "The server has stopped."
