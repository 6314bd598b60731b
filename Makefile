# Everything a newcomer needs: `make swarm` runs a three-node swarm here, `make test` runs the tests.
# Both create .venv by themselves; `make setup` does nothing when nothing changed.

PYTHON ?= python3
BIN := .venv/bin
PRESET ?= tiny

.PHONY: setup swarm test check check-slow docker-test clean

setup: .venv/.installed

.venv/.installed: requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) found: install Python 3.11 or newer, or call make PYTHON=/path/to/python3"; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

swarm: setup
	$(BIN)/python examples/local_swarm.py --preset $(PRESET)

test: setup
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check-slow: setup
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

docker-test: setup
	docker/test.sh

clean:
	rm -rf .venv build *.egg-info
