#!/usr/bin/env bash
# Start a prefill instance, a decode instance and a router one by one, ask for an answer, and stop them.
#
#   examples/prefill_and_decode_by_hand.sh [OPTIONS]
#
# OPTIONS go to both instances, for example --model-path FILE. "pdserve up" does the same with one command.
# "pdserve" must be on the PATH: source .venv/bin/activate
set -euo pipefail
router=${ROUTER_PORT:-8000} prefill=${PREFILL_PORT:-30000} decode=${DECODE_PORT:-30001} bootstrap=${BOOTSTRAP_PORT:-8998}
for port in "$router" "$prefill" "$decode"; do
  if curl --silent --output /dev/null "http://127.0.0.1:$port/health"; then
    echo "Port $port is in use. Choose others: ROUTER_PORT=8009 PREFILL_PORT=30008 DECODE_PORT=30009 $0" >&2
    exit 1
  fi
done
logs=$(mktemp -d)
trap 'kill $(jobs -p) 2> /dev/null || true; wait; rm -rf "$logs"' EXIT

# Wait until the server at port $1, which is process $2 and named $3, is healthy.
wait_healthy() {
  until curl --silent --fail --output /dev/null "http://127.0.0.1:$1/health"; do
    kill -0 "$2" 2> /dev/null || { echo "The $3 did not start:" >&2; tail "$logs/$3.log" >&2; exit 1; }
    sleep 0.2
  done
  echo "The $3 is healthy at port $1."
}

# A decode asks the prefill's bootstrap port where to get the KV cache.
pdserve server --disaggregation-mode prefill --port "$prefill" --disaggregation-bootstrap-port "$bootstrap" "$@" \
  &> "$logs/prefill.log" &
prefill_pid=$!
# Without "always", the decode computes short prompts itself if that is faster.
pdserve server --disaggregation-mode decode --port "$decode" --disaggregation-threshold always "$@" \
  &> "$logs/decode.log" &
decode_pid=$!
pdserve router --port "$router" --prefill "http://127.0.0.1:$prefill" "$bootstrap" \
  --decode "http://127.0.0.1:$decode" &> "$logs/router.log" &
router_pid=$!
wait_healthy "$prefill" "$prefill_pid" prefill
wait_healthy "$decode" "$decode_pid" decode
wait_healthy "$router" "$router_pid" router

# "transfer_bytes" in the answer is the KV that went from the prefill to the decode.
curl --silent --show-error --fail-with-body "http://127.0.0.1:$router/generate" -d '{
  "text": "The capital of France is",
  "sampling_params": {"temperature": 0, "max_new_tokens": 16}
}'
echo

# The router first, so that it sends nothing more. Each ends its running requests and exits with 0.
for pid in "$router_pid" "$decode_pid" "$prefill_pid"; do
  kill -TERM "$pid"
  wait "$pid"
done
echo "All three have stopped."
