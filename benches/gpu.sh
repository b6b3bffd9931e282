#!/usr/bin/env bash
# Parity, memory and speed of one device, from a bench program that is already built: builds nothing, fetches nothing.
# Prints one table in Markdown and writes gpu.json. benches/README.md describes how to build and copy the program.
#
#   benches/gpu.sh [PROGRAM]                 on cuda:0, in target/gpu
#   DEVICE=cpu benches/gpu.sh                a smoke test of all parts
#   SIZE=qwen3-8b OUT=results benches/gpu.sh
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
device=${DEVICE:-cuda:0}
out=${OUT:-$root/target/gpu}

complain() {
  echo "benches/gpu.sh: $*" >&2
  exit 1
}

program=${1:-}
if [ -z "$program" ]; then
  # Cargo leaves the programs of all builds; the newest is that of the last one.
  for found in "$root"/target/{release,debug}/deps/dispatch-*; do
    if [ -x "$found" ] && [ ! -d "$found" ] && { [ -z "$program" ] || [ "$found" -nt "$program" ]; }; then program=$found; fi
  done
fi
[ -n "$program" ] || complain 'there is no bench program; build one (cargo bench --bench dispatch --no-run), or name one'
[ -x "$program" ] || complain "$program is no program; build one (cargo bench --bench dispatch --no-run), or name another"

libtorch=${LIBTORCH:-$(python3 -c 'import importlib.util; print(importlib.util.find_spec("torch").submodule_search_locations[0])' 2>/dev/null || true)}
[ -e "$libtorch/lib/libtorch_cpu.so" ] ||
  complain "libtorch 2.11.0 is not at '$libtorch'; set LIBTORCH to a folder with lib/libtorch_cpu.so, such as that of the Python package torch"
if [ -e "$libtorch/version.py" ] && ! grep -q "'2\.11\." "$libtorch/version.py"; then
  complain "$libtorch is another version than 2.11, which the program was built for; set LIBTORCH to one of 2.11"
fi

# Before the path that the program was linked with.
export LD_LIBRARY_PATH="$libtorch/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
exec "$program" --gpu --device "$device" --date "$(date -u +%F)" --out "$out" ${SIZE:+--size "$SIZE"}
