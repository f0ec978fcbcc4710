# The two commands: `make demo` and `make test`. Each sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
COMPILED := codec quic_pfec/schedule quic_pfec/sim quic_pfec/quic
SOURCES := $(filter-out %/_codec.c %/_policy.c %/_engine.c %/_fast.c,$(wildcard $(foreach part,pyx pxi c h,$(addsuffix /*.$(part),$(COMPILED)))))

.PHONY: setup demo test suite test-isa check fast fuzz wheel clean
setup: $(STAMP)

$(STAMP): pyproject.toml $(SOURCES) .ci/setup
	PYTHON="$(PYTHON)" VENV="$(VENV)" bash .ci/setup
	@touch $(STAMP)

demo: setup
	$(BIN)/quic-pfec demo --point both --json out/demo.json --picture out/demo.png --trace out/demo.csv

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

fast: setup
	$(BIN)/python -m pytest -q -m "not slow"

test: check suite

# What real time cannot change runs in two processes, the rest alone behind it, whatever came of the first.
suite: setup
	$(BIN)/python -m pytest -q -n 2 -m "not realtime"; parallel=$$?; \
	$(BIN)/python -m pytest -q -m realtime; realtime=$$?; \
	echo "suite: not realtime exits with $$parallel, realtime with $$realtime"; \
	test $$parallel -eq 0 && test $$realtime -eq 0

# The codec's tests once per level of this processor; `make test` holds them too.
test-isa: setup
	$(BIN)/python -m pytest -q --durations=0 tests/test_codec_isa.py

fuzz: setup
	PYTHON=$(BIN)/python bash .ci/fuzz

wheel: setup
	$(BIN)/python -m build --outdir dist .

clean:
	rm -rf build dist out *.egg-info quic_pfec/*.so quic_pfec/*/*.so codec/_codec.c quic_pfec/schedule/_policy.c quic_pfec/sim/_engine.c quic_pfec/quic/_fast.c
