#!/usr/bin/env bash
# Draws the dashboard: a run of some minutes, a Prometheus that scrapes it, and the panels of draftmill.json by Grafana's own
# components in a headless Chromium. `make picture` runs it.
#
#   draw.sh           draftmill.png: a simulated run, with failures, pauses and reloads; every row but what only real models give
#   draw.sh --real    acceptance.png: the row that a simulated run cannot fill, from a tiny model that really trains (needs LIBTORCH)
#
# SECONDS_WATCHED=100 takes the picture sooner; the default is 390.
set -euo pipefail
seconds=${SECONDS_WATCHED:-390}
row='Drafter on held-out data'
if [ "${1:-}" = --real ]; then
  kind=real picture=acceptance.png rows="only=$row" features=()
else
  kind=simulated picture=draftmill.png rows="without=$row" features=(--no-default-features)
fi
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
cache=${DRAFTMILL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/draftmill}
width=1680

say() { echo "draw.sh: $*" >&2; }
fail() { say "$*"; exit 1; }
grep -q "^title = \"$row" "$root/dashboards/draftmill.toml" || fail "the dashboard has no row \"$row\""
for tool in cargo node npm prometheus chromium pngquant; do
  command -v $tool >/dev/null || fail "$tool is missing; install it (Debian: apt-get install nodejs npm prometheus chromium pngquant fonts-inter)"
done

# The packages by name and version, in a folder that is whole or absent.
packages=$cache/render-$(md5sum <"$here/packages.txt" | cut -c1-8)
if [ ! -d "$packages" ]; then
  say "installing Grafana's components into $packages (450 MB)"
  mkdir -p "$cache"
  new=$(mktemp -d "$cache/render-new.XXXXXX")
  echo '{"private": true, "type": "module"}' >"$new/package.json"
  xargs npm install --prefix "$new" --silent --no-audit --no-fund --no-package-lock --ignore-scripts --legacy-peer-deps <"$here/packages.txt"
  mv "$new" "$packages"
fi

work=$(mktemp -d)
started=()
finish() {
  for pid in "${started[@]}"; do kill "$pid" 2>/dev/null || true; done
  wait
  rm -rf "$work"
}
trap finish EXIT
# The port in the first line of a log that has one.
port() {
  for _ in $(seq 150); do
    found=$(grep -o '127\.0\.0\.1:[0-9]*' "$1" | head -1) || true
    [ -z "$found" ] || { echo "$found"; return; }
    sleep 0.2
  done
  fail "nothing listens: $(tail -5 "$1")"
}
free() { node -e 'const s = require("net").createServer().listen(0, "127.0.0.1", () => { console.log(`127.0.0.1:${s.address().port}`); s.close(); })'; }

say "building draftmill and the page"
(cd "$root" && cargo build --quiet --locked "${features[@]}")
cp "${CARGO_TARGET_DIR:-$root/target}/debug/draftmill" "$work/"
cp -r "$here/page" "$root/dashboards/draftmill.json" "$work/"
mv "$work/draftmill.json" "$work/page/"
ln -s "$packages/node_modules" "$packages/package.json" "$work/page/"
(cd "$work/page" && node node_modules/vite/bin/vite.js build --logLevel error)

say "starting the run"
cd "$work"
cp -r "$root/tests/golden/target_qwen3" target
sed -i 's/"max_position_embeddings": [0-9]*/"max_position_embeddings": 4096/' target/config.json
# Lengths as of conversations: lognormal, of a median of 650 or, for the tiny model, of 48. Tokens go up in even strides.
awk -v median=$([ $kind = real ] && echo 48 || echo 650) 'BEGIN { srand(7); for (row = 0; row < (median < 100 ? 400 : 2600); row++) {
  n = int(median * exp(0.8 * sqrt(-2 * log(1 - rand())) * cos(6.283185 * rand()))); n = n < 32 ? 32 : n > 3072 ? 3072 : n
  start = int(40 * rand()); stride = 1 + int(9 * rand()); ids = mask = ""
  for (i = 0; i < n; i++) { ids = ids (i ? "," : "") 20 + (start + stride * i) % 40; mask = mask (i ? "," : "") (i > n / 8) }
  print "{\"input_ids\":[" ids "],\"loss_mask\":[" mask "]}" } }' >rows.jsonl
cp "$here/$kind.toml" run.toml
./draftmill prepare --config run.toml >prepare.log 2>&1 || fail "$(cat prepare.log)"
admin=$(free)
./draftmill train --config run.toml --set "admin.listen=$admin" >train.log 2>&1 &
started+=($!)
run=$!
metrics=$(port train.log)

prometheus=$(free)
sed -e "s/127\.0\.0\.1:9464/$metrics/" -e "s|- alerts.yml|- $root/dashboards/alerts.yml|" "$root/dashboards/prometheus.yml" >prometheus.yml
prometheus --config.file=prometheus.yml --storage.tsdb.path=data --web.listen-address="$prometheus" >prometheus.log 2>&1 &
started+=($!)

say "watching it for $seconds seconds"
begin=$SECONDS
# Waits until a share of the time has passed, in percent.
until_percent() {
  while [ $(((SECONDS - begin) * 100)) -lt $(($1 * seconds)) ]; do
    kill -0 $run 2>/dev/null || fail "the run ended early: $(tail -5 train.log)"
    sleep 1
  done
}
edit() { sed "$1" run.toml >next.toml && mv next.toml run.toml; }
if [ $kind = simulated ]; then
  until_percent 30
  edit 's/^min_ready = .*/min_ready = 8/'
  until_percent 45
  edit 's/^paused = .*/paused = [2]/'
  until_percent 60
  edit 's/^paused = .*/paused = []/'
  until_percent 75
  cp run.toml sound.toml
  edit 's/^min_ready = .*/min_ready = 99/'
  until_percent 80
  mv sound.toml run.toml
fi
until_percent 100

say "drawing"
preview=$(free)
(cd page && PROMETHEUS="http://$prometheus" exec node node_modules/vite/bin/vite.js preview --host 127.0.0.1 --port "${preview##*:}" --strictPort) >preview.log 2>&1 &
started+=($!)
port preview.log >/dev/null
# Draws the page in a window of a height, into full.png, and what became of it into page.html; again where a busy machine gave up waiting.
browse() {
  for _ in 1 2 3 4 5; do
    chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$work/chromium" --force-device-scale-factor=1 \
      --window-size="$width,$1" --virtual-time-budget=60000 --dump-dom --screenshot="$work/full.png" \
      "http://$preview/?seconds=$seconds&${rows// /%20}" >page.html 2>chromium.log
    ! grep -q 'data-drawn="true"' page.html || return 0
  done
  fail "the page did not come to an end: $(grep -o 'failed: .*' page.html)"
}
browse 1000
# A machine without a GPU has no memory of one.
if empty=$(grep -o 'data-empty="[^"]*"' page.html | grep -v '"GPU memory"'); then fail "panels without data: $empty"; fi
browse "$(grep -o 'data-height="[0-9]*' page.html | grep -o '[0-9]*$')"
pngquant --force --speed 1 --strip --output "$root/dashboards/$picture" 128 "$work/full.png"
say "dashboards/$picture, $(stat -c %s "$root/dashboards/$picture") bytes"
