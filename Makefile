# Every command works in a fresh clone: the first one makes .venv and installs what all of them need, later ones find it ready.
#
#   make train [DATA=path] [ARGS=...]   train the example ranking model (on generated data without DATA)
#   make train EXAMPLE=hstu ...         train the example next-item model
#   make serve [ARGS=...]               serve a trained model over HTTP; without ARGS=--weights=FILE, a small one is trained first
#   make test [ARGS=...]                run the tests but those marked slow; ARGS are options of pytest
#   make test-slow [ARGS=...]           run the slow tests
#   make test-all [ARGS=...]            run both
#   make test-interpreter [ARGS=...]    one of the four parts of make test; the others are test-compile, test-modules and test-others
#   make fuzz [SECONDS=60] [SEED=1] [ARGS="--function linear_compress --dtype bfloat16 --device cuda"]
#                                       run random cases of every function on the CPU, in Triton's interpreter and on a GPU
#   make mutants [ARGS=...]             apply one-line bugs, one at a time, to a copy of the project: the tests named for each must fail
#   make mutants-sample                 apply 8 of them, others for each commit
#   make test-gpu [ARGS=--all-combinations]   run the tests that need an NVIDIA GPU; the report is runs/test-gpu.txt
#   make test-newer-tritons             compile Hopper's own kernels under the newer Tritons too
#   make test-newer-tritons-sample      compile each of them once under each of the newer Tritons
#   make notebooks                      execute the notebooks and keep their outputs
#   make lint                           check style, formatting, spelling and types
#   make docs                           build the documentation into docs/_build; a warning is an error
#   make links                          look up the documentation's external links; needs the internet
#   make dist                           build the source distribution and the wheel into dist/
#   make smoke                          install the wheel of dist/ into an empty environment, and run README's example
#   make bench [ARGS=...] [OUT=folder]  measure the kernels on a GPU and write the record; ARGS=--resume goes on with the day's
#   make leaderboard [ARGS=...] [OUT=folder]   measure HSTU's attention and layer beside what else computes them, each in a process of
#                                       its own; ARGS="--only D128 --peers Meta --limit 60", peers on PYTHONPATH
#   make profile [OUT=folder]           profile the main kernels under ncu, for the record
#   make lock [ARGS=--upgrade]          pin all packages in constraints/*.txt, of the versions in constraints/*.in
#   make environments                   make .venv and whatever else the targets above install
#   make clean                          remove .venv and whatever was built
#
# PYTHON=python3.12   makes .venv with another Python
# PIP_ARGS=...        goes to every pip install, for example the address of PyTorch's index of CPU builds
# VARIANT=cpu|cuda    overrides the look for a GPU
# PY=python           runs in an environment you prepared yourself and installs nothing
# WORKERS=0           runs the tests in one process, without pytest-xdist
# GPU_WORKERS=16      processes of make test-gpu, by default one for each core and each 4 GiB of the GPUs' memory, at most 32

SHELL := /bin/bash
.DEFAULT_GOAL := test
.PHONY: train serve test test-slow test-all test-interpreter test-compile test-modules test-others test-slow-interpreter \
	test-slow-compile test-slow-modules test-slow-others test-all-interpreter test-all-compile test-all-modules test-all-others \
	fuzz mutants mutants-sample test-gpu test-newer-tritons test-newer-tritons-sample notebooks lint docs links dist smoke bench \
	leaderboard profile record environments lock clean

# Otherwise each of the many processes that tests start compiles torch's files again.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VARIANT ?= $(if $(shell nvidia-smi -L 2>/dev/null),cuda,cpu)
WORKERS ?= 2
gpu_mib = $(shell nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | awk '{n += $$1} END {print n}')
GPU_WORKERS ?= $(shell printf '%s\n' 32 $$(nproc) $$(( $(or $(gpu_mib),131072) / 4096 )) | sort -n | head -n 1)
EXAMPLE ?= dlrm

# torchrec names the CUDA fbgemm-gpu, and CPU builds of fbgemm-gpu have another name: so these two come without dependencies.
fbgemm_cpu := fbgemm-gpu-cpu
fbgemm_cuda := fbgemm-gpu
# The kernel tests run in its interpreter.
triton := triton==3.6.0
# Those of newer releases of torch. Each release of torch's CUDA build requires one version.
newer_tritons := 3.7.1 3.8.0 3.9.0

ifdef PY
export PYTHONPATH := $(CURDIR):$(CURDIR)/kernels:$(PYTHONPATH)
else
PY := .venv/bin/python
ENV := .venv/.installed-$(VARIANT)
DOCS_ENV := .venv/.installed-docs
endif
# Python compiles what it imports; most of the installed files are never imported.
pip := $(PY) -m pip install --quiet --no-compile --disable-pip-version-check $(PIP_ARGS)
# Two processes may share two cores: waiting threads do not spin, and Inductor starts no processes of its own. It asks the processor which
# vectors there are: with a program for each kind, g++ would take 5 s.
two_cores := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive TORCHINDUCTOR_COMPILE_THREADS=1 TORCHINDUCTOR_VEC_ISA_OK=1
pytest = $(two_cores) $(PY) -m pytest \
	$(if $(filter-out 0,$(WORKERS)),-n $(WORKERS) --dist worksteal) --durations=10
mark = $(if $(findstring all,$@),"slow or not slow",$(if $(findstring slow,$@),"slow","not slow"))
interpreter_tests := tests/jagged_kernels/interpreter
compile_tests := tests/jagged_kernels/compile
modules_tests := tests/jagged_modules
no_tests_is_fine := $(if $(strip $(ARGS)),|| test $$? = 5)

train: $(ENV)
	$(PY) examples/train_$(EXAMPLE).py $(if $(DATA),--data $(DATA)) $(ARGS)

serve: $(ENV)
	$(PY) examples/serve_ranking.py $(if $(DATA),--data $(DATA)) $(ARGS)

# the longest first
test: test-modules test-others test-compile test-interpreter
test-slow: test-slow-modules test-slow-others test-slow-interpreter test-slow-compile
# Both kinds are collected once.
test-all: test-all-modules test-all-others test-all-interpreter test-all-compile

# Triton reads TRITON_INTERPRET once, when it is imported: hence a process of its own.
test-interpreter test-slow-interpreter test-all-interpreter: $(ENV)
	TRITON_INTERPRET=1 $(pytest) -m $(mark) $(interpreter_tests) $(ARGS) $(no_tests_is_fine)

# Lines of the source beside the machine code take an eighth of the time, and no test reads them.
test-compile test-slow-compile test-all-compile: $(ENV)
	TRITON_DISABLE_LINE_INFO=1 $(pytest) -m $(mark) $(compile_tests) $(ARGS) $(no_tests_is_fine)

test-modules test-slow-modules test-all-modules: $(ENV)
	$(pytest) -m $(mark) $(modules_tests) $(ARGS) $(no_tests_is_fine)

test-others test-slow-others test-all-others: $(ENV)
	$(pytest) -m $(mark) $(foreach x,$(interpreter_tests) $(compile_tests) $(modules_tests),--ignore=$x) $(ARGS) $(no_tests_is_fine)

fuzz: $(ENV)
	$(PY) tests/fuzz.py $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) $(ARGS)

mutants-sample: ARGS = --sample 8 --seed $(shell git rev-parse HEAD)
mutants mutants-sample: $(ENV)
	$(two_cores) $(PY) tests/mutants.py --workers $(or $(filter-out 0,$(WORKERS)),1) $(ARGS)

# One test at a time to each worker, in the order of tests/gpu_suite.py. Inductor compiles in the workers, not in processes of its own.
test-gpu: $(ENV)
	@nvidia-smi -L >/dev/null || { echo "make test-gpu needs an NVIDIA GPU: none was found" >&2; exit 1; }
	mkdir -p runs
	set -o pipefail; OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 TRITON_DISABLE_LINE_INFO=1 \
		$(PY) -m pytest tests --gpu-suite -n $(GPU_WORKERS) --dist load \
		--maxschedchunk 1 --max-worker-restart 30 --durations=25 -q -rf $(ARGS) 2>&1 | tee runs/test-gpu.txt

# Gluon, in which they are written, changes between versions of Triton. The sample is for one process, which knows what it compiled.
test-newer-tritons-sample: ARGS = --each-kernel-once
test-newer-tritons-sample: WORKERS = 0
test-newer-tritons test-newer-tritons-sample: $(ENV) $(newer_tritons:%=.tritons/%/.installed)
	status=0; \
	for version in $(newer_tritons); do \
		echo "Triton $$version"; \
		TRITON_DISABLE_LINE_INFO=1 PYTHONPATH=$(CURDIR)/.tritons/$$version:$$PYTHONPATH \
			$(pytest) -m "not slow" $(compile_tests) -k hopper $(ARGS) || status=1; \
	done; \
	exit $$status

notebooks: $(ENV)
	$(PY) -m jupyter execute --inplace notebooks/*.ipynb

lint: $(ENV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m codespell_lib --ignore-words-list dout --ignore-regex '"image/png": "[^"]*"' $$(git ls-files '*.md' '*.py' '*.ipynb' '*.cff' Makefile '*.toml' '*.yml')
	$(PY) -m pyright --pythonpath $(PY)
	$(PY) -m mypy

docs: $(ENV) $(DOCS_ENV)
	$(PY) -m sphinx -q -W --keep-going -b html -c docs . docs/_build

# Broken links inside the project are found by tests and by make docs.
links: $(ENV) $(DOCS_ENV)
	$(PY) -m sphinx -q -b linkcheck -c docs . docs/_build/links

dist: $(ENV)
	rm -rf dist
	$(PY) -m build --outdir dist

smoke:
	rm -rf dist/.smoke
	$(PYTHON) -m venv dist/.smoke
	dist/.smoke/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) dist/*.whl
	sed -n '/^```python$$/,/^```$$/p' README.md | grep -v '^```' >dist/.smoke/example.py
	cd dist/.smoke && bin/python -I example.py && bin/python -I -c "import jagged_modules; print(jagged_modules.__version__)"

bench: $(ENV)
	@nvidia-smi -L >/dev/null || { echo "make bench needs an NVIDIA GPU: none was found" >&2; exit 1; }
	status=0; \
	for bench in kernels/benchmarks/bench_*.py; do $(PY) $$bench --pause 0.15 --rep 40 $(if $(OUT),--out $(OUT)/runs) $(ARGS) || status=1; done; \
	$(MAKE) record && exit $$status

leaderboard: $(ENV)
	@nvidia-smi -L >/dev/null || { echo "make leaderboard needs an NVIDIA GPU: none was found" >&2; exit 1; }
	status=0; $(PY) kernels/benchmarks/leaderboard.py --pause 0.15 --rep 40 $(if $(OUT),--out $(OUT)/runs) $(ARGS) || status=1; \
	$(MAKE) record && exit $$status

profile: $(ENV)
	$(PY) kernels/benchmarks/profile_kernels.py $(if $(OUT),--out $(OUT)/runs)
	$(MAKE) record

record: $(ENV)
	$(PY) kernels/benchmarks/record.py $(OUT)

clean:
	rm -rf .venv .tritons build dist docs/_build docs/jupyter_execute *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# constraints/ has versions that work together, of all packages: no release of one changes what is installed.
.venv/.installed-$(VARIANT): setup.py pyproject.toml Makefile constraints/$(VARIANT).txt
	rm -f .venv/.installed-*
	$(PYTHON) -m venv .venv
	$(pip) "setuptools>=77" wheel
	$(pip) --constraint constraints/$(VARIANT).txt torch --no-build-isolation --editable ".[dev,notebooks,serve,torchrec]"
	$(pip) --constraint constraints/$(VARIANT).txt --no-deps $(fbgemm_$(VARIANT)) torchrec $(triton)
	touch $@

# TorchRec names another torchmetrics and, without a GPU, another fbgemm-gpu: both are added as they stand. torch's CUDA build names what
# it alone needs by exact versions.
lock: $(ENV)
	$(pip) uv
	set -e; for variant in cpu cuda; do \
		lock=constraints/$$variant; \
		$(PY) -m uv pip compile --quiet --universal --python-version 3.10 --no-annotate --no-header --no-emit-index-url \
			--all-extras --constraint $$lock.in --output-file $$lock.txt $(ARGS) pyproject.toml; \
		test $$variant = cuda || sed -i -E '/^(nvidia|cuda|triton)\>/d' $$lock.txt; \
		grep -E '^(torchrec|fbgemm-gpu)' $$lock.in >>$$lock.txt; \
		sed -i "1i # make lock wrote this from $$variant.in and pyproject.toml, for Python 3.10 and newer." $$lock.txt; \
	done

environments: $(ENV) $(DOCS_ENV) $(newer_tritons:%=.tritons/%/.installed)

# A file of its own, so that the tests do not wait for what only the documentation needs.
.venv/.installed-docs: $(ENV)
	$(pip) --constraint constraints/$(VARIANT).txt --no-build-isolation --editable ".[docs]"
	touch $@

.tritons/%/.installed: $(ENV)
	rm -rf .tritons/$*
	$(pip) --no-deps --target .tritons/$* triton==$*
	touch $@
