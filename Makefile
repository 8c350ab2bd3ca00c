# Two commands: `make demo` and `make test`. Both install what they need into .venv first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo paper paper-full rehearse test test-oldest faults lint bench assets docs dist install clean

demo: install
	@$(BIN)/spot demo

# The paper's tables and figures on the built-in data, in studies/; ARGS names other models and images.
paper: install
	OMP_NUM_THREADS=1 $(BIN)/python -m paper all $(ARGS)

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

# Some 20,000 kills, races, full disks, damaged files and strange calls, of which `make test` has a sample.
faults: install
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults $(ARGS)

# The suite's core with the oldest versions that pyproject.toml allows, in an environment of its own.
test-oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --upgrade pip
	sed -nE '/^dependencies/,/^]/s/.*"([^>]+)>=([^"]+)".*/\1==\2/p' pyproject.toml > .venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip install --quiet --constraint .venv-oldest/constraints.txt --editable '.[clipseg,onnx]' pytest hypothesis
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest tests/tokens tests/placement tests/models/test_spot_vit.py \
	  tests/models/test_checkpoints.py tests/test_store.py tests/faults/test_refused.py $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install
	$(BIN)/python -m benchmarks $(ARGS)

# The paper at its own scale: ViT-B/16 of three kinds, ImageNet, all tables and figures. DATA is ImageNet's root, WEIGHTS a folder with
# the four published files (paper/scale_up.py names them). Resumes. On several nodes: LAUNCH='accelerate launch --num_machines 4 …'.
LAUNCH ?= $(BIN)/accelerate launch
paper-full: install
	$(LAUNCH) -m paper.scale_up --data $(DATA) --weights $(WEIGHTS) --out runs/paper $(ARGS)

# All of its steps: random weights, 2 blocks, 40 images, two processes, about 16 minutes of processor time in all.
rehearse: install
	rm -rf build/rehearsal
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc_per_node 2 -m paper.scale_up --rehearse --out build/rehearsal

assets: install
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.make_assets $(ARGS)

# The guides and the API reference as a site, build/docs/site/index.html.
docs: install
	$(BIN)/python -m tools.site build/docs

# Wheel and sdist of what is committed, and the wheel tried in an environment that has nothing else.
# With REPOSITORY=https://github.com/OWNER/NAME the README's images and links have addresses, as a package index needs.
dist: install
	@rm -rf dist build/clean build/try build/source
	@mkdir -p build/source && git archive HEAD | tar -x -C build/source
	@$(if $(REPOSITORY),$(BIN)/python -m tools.index_readme $(REPOSITORY) v$$($(BIN)/spot --version | cut -d' ' -f2) > build/source/README.md)
	$(call step,Building wheel and sdist,$(BIN)/python -m pip install --quiet build && $(BIN)/python -m build --outdir dist build/source)
	$(call step,Installing the wheel into an empty environment,$(PYTHON) -m venv build/clean && build/clean/bin/pip install --quiet dist/*.whl)
	$(call step,Running spot demo,mkdir -p build/try && cd build/try && ../clean/bin/spot demo)
	$(call step,Running spot predict,cd build/try && ../clean/bin/spot predict "$$(ls demo/*.png | head -1)" --model scenes-a)
	@ls dist

install: .venv/installed

# $(call step,What is done,command): one line with the time it took; what the command says is shown only if it fails.
define step
@printf '%s … ' "$(1)"; began=$$(date +%s); said=$$($(2) 2>&1) || { printf 'failed\n%s\n' "$$said"; exit 2; }; \
took=$$(($$(date +%s) - began)); if [ $$took -lt 100 ]; then echo "done in $$took s"; else echo "done in $$((took / 60)) min"; fi
endef

.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "SPoT needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 2; }
	$(call step,Making .venv,$(PYTHON) -m venv .venv)
	$(call step,Updating pip,$(BIN)/python -m pip install --quiet --upgrade pip)
	$(call step,Installing SPoT and what it needs,$(BIN)/python -m pip install --quiet --editable '.[dev]')
	@touch $@

clean:
	rm -rf .venv .venv-oldest build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
