# memopt: `make help` lists what there is. Every target makes what it needs first.
PYTHON ?= python3
CC ?= gcc
ENVIRONMENT = $(PYTHON) tests/environments.py
TORCH ?= 2.13.0
PYTEST ?=
# A worker more than there are cores, since many tests wait (for a disk, a process, a terminal), but at most 8; each file
# whole in one of them, files in the order of tests/longest_first.txt.
TESTS = -m pytest --numprocesses "$$(n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 8 ? n + 1 : 8)))" --dist loadfile \
    --no-loadscope-reorder

# Hundreds of processes of the tests would compile the package anew where this is set, as in images of Python.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := build
.DELETE_ON_ERROR:
# Objects are of pattern rules alone: make would delete them at its end, and build anew what the next one runs.
.SECONDARY:

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile

# ---- building ---------------------------------------------------------------------------------------------------
build:  ## the extension and the simulated device's libraries, in place (import memopt works from here)
	@echo "building the extension and the simulated device" >&2
	@python="$$($(ENVIRONMENT) build)" && "$$python" setup.py --quiet build_ext --inplace

wheel:  ## dist/memopt-*.whl: one for every Python >= 3.11 and every torch >= 2.10
	@python="$$($(ENVIRONMENT) build)" && "$$python" setup.py --quiet bdist_wheel
	@ls -l dist/*.whl

release:  ## the last commit's sdist and wheels (x86-64, aarch64) in dist/, each built twice, and checked; nothing is uploaded
	@python="$$($(ENVIRONMENT) release)" && "$$python" tests/tooling/release.py

clean:  ## removes what was built; the environments in .venv stay
	rm -rf build dist memopt.egg-info memopt/_C*.so memopt/sim/cu12 memopt/sim/cu13
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# ---- the main job -------------------------------------------------------------------------------------------------
QUICK ?=

demo: build  ## trains two real models in half the memory, and writes memopt-demo.html; QUICK=1: smaller, under 40 s
	@$(ENVIRONMENT) cpu >build/python-cpu
	@$(ENVIRONMENT) sim >build/python-sim
	@"$$(cat build/python-cpu)" -m memopt demo --sim-python "$$(cat build/python-sim)" $(if $(QUICK),--quick)

# ---- tests ----------------------------------------------------------------------------------------------------------
test: environments  ## everything: C, Python and the simulated device; one closing line
	@"$$(cat build/python-cpu)" $(TESTS) $(PYTEST)

environments: build
	@$(ENVIRONMENT) cpu >build/python-cpu
	@$(ENVIRONMENT) sim >build/python-sim
	@$(ENVIRONMENT) notebook >build/python-notebook
	@$(ENVIRONMENT) extras >build/python-extras
	@$(ENVIRONMENT) data >build/python-data
	@$(ENVIRONMENT) techniques >build/python-techniques

test-c: environments  ## the C tests alone
	@"$$(cat build/python-cpu)" $(TESTS) tests/c $(PYTEST)

test-sim: build  ## the simulated device's tests alone, on any torch: make test-sim TORCH=2.11.0
	@$(ENVIRONMENT) cpu >build/python-cpu
	@$(ENVIRONMENT) sim --torch $(TORCH) >build/python-sim-$(TORCH)
	@"$$(cat build/python-cpu)" $(TESTS) tests/sim --sim-python "$$(cat build/python-sim-$(TORCH))" $(PYTEST)

test-asan test-ubsan test-tsan: test-%: environments  ## the C tests under a sanitizer
	@"$$(cat build/python-cpu)" $(TESTS) tests/c --c-variant $* $(PYTEST)

test-asan:  ## the C tests under AddressSanitizer and LeakSanitizer
test-ubsan:  ## the C tests under UndefinedBehaviorSanitizer
test-tsan:  ## the C tests under ThreadSanitizer

# Of qemu-user 10 three fail, in sim/test_fork.c: it ignores MADV_DONTFORK. Of 7.2 two more: it refuses
# PR_SET_CHILD_SUBREAPER (test_orphans.c), and ends a child that was forked beside threads (test_disk.c). All five pass under
# a kernel of their own (qemu-system-aarch64, Linux 6.12).
test-aarch64: environments  ## the C tests as aarch64 code under qemu (needs gcc-aarch64-linux-gnu, qemu-user)
	@for tool in $(aarch64_CC) qemu-aarch64; do command -v $$tool >/dev/null || { echo "test-aarch64: there is no $$tool \
	(Debian: apt-get install gcc-aarch64-linux-gnu qemu-user)" >&2; exit 1; }; done
	@CC=$(aarch64_CC) $(PYTHON) csrc/simcuda/build_libraries.py build/c/aarch64/libraries >&2
	@"$$(cat build/python-cpu)" $(TESTS) tests/c --c-variant aarch64 $(PYTEST)

valgrind: environments  ## the C tests under valgrind's memcheck
	@"$$(cat build/python-cpu)" $(TESTS) tests/c --c-variant valgrind $(PYTEST)

# Goes on where it was cut off. What misses its goal fails the whole, but only once all has run.
soak: environments  ## the long form of everything that has one; figures go to benchmarks/results
	@failed=0; \
	$(MAKE) --no-print-directory bench BENCH_OPTIONS=--resume || failed=1; \
	"$$(cat build/python-cpu)" benchmarks/torch_versions.py || failed=1; \
	"$$(cat build/python-cpu)" benchmarks/convergence_8bit.py --resume || failed=1; \
	MEMOPT_SOAK=1 "$$(cat build/python-cpu)" $(TESTS) $(PYTEST) || failed=1; \
	MEMOPT_SOAK=1 "$$(cat build/python-cpu)" -m pytest tests/c/test_pool_churn.c --c-variant bench || failed=1; \
	"$$(cat build/python-data)" -m pytest tests/unit/nn/test_fuse_loss_head.py -k of_transformers || failed=1; \
	exit $$failed

# On the simulated device; on a GPU, with the torch of the Python at hand.
BENCH_SIM = benchmarks/bench_alloc_core.py benchmarks/bench_alloc_traces.py benchmarks/bench_alloc_train.py \
	benchmarks/bench_large_models.py benchmarks/bench_profile.py benchmarks/bench_offload_activations.py \
	benchmarks/bench_prefetcher.py benchmarks/bench_step_overlap.py
BENCH_GPU = benchmarks/bench_alloc_gpu.py
BENCH_ESTIMATE = benchmarks/bench_estimate.py
BENCH_LIBRARIES = benchmarks/bench_find_batch_size.py
BENCH_DATA = benchmarks/bench_cached.py benchmarks/bench_mapped_dataset.py
BENCH_TECHNIQUES = benchmarks/bench_compress.py
# By hand: in an environment with a CPU build of torch and the libraries that it names; or with a directory on a disk.
BENCH_BY_HAND = benchmarks/bench_host_step.py benchmarks/bench_public_models.py benchmarks/bench_disk_states.py
BENCH_CPU = $(filter-out $(BENCH_SIM) $(BENCH_GPU) $(BENCH_ESTIMATE) $(BENCH_LIBRARIES) $(BENCH_DATA) \
	$(BENCH_TECHNIQUES) $(BENCH_BY_HAND),$(wildcard benchmarks/bench_*.py))

bench: environments  ## every benchmark (benchmarks/bench_*.py) beside its peer; README's figures from their JSON
	@failed=0; \
	for b in $(BENCH_CPU); do "$$(cat build/python-cpu)" $$b $(BENCH_OPTIONS) || failed=1; done; \
	for b in $(BENCH_DATA); do "$$(cat build/python-data)" $$b $(BENCH_OPTIONS) || failed=1; done; \
	for b in $(BENCH_TECHNIQUES); do "$$(cat build/python-techniques)" $$b $(BENCH_OPTIONS) || failed=1; done; \
	for b in $(BENCH_SIM); do "$$(cat build/python-sim)" $$b $(BENCH_OPTIONS) || failed=1; done; \
	$(ENVIRONMENT) estimate >build/python-estimate && \
	    "$$(cat build/python-estimate)" $(BENCH_ESTIMATE) $(BENCH_OPTIONS) || failed=1; \
	$(ENVIRONMENT) libraries >build/python-libraries && \
	    "$$(cat build/python-libraries)" $(BENCH_LIBRARIES) $(BENCH_OPTIONS) || failed=1; \
	if [ -e /dev/nvidiactl ]; then for b in $(BENCH_GPU); do $(PYTHON) $$b $(BENCH_OPTIONS) || failed=1; done; \
	else echo "$(BENCH_GPU): not run, there is no GPU here" >&2; fi; \
	echo "$(BENCH_BY_HAND): not run, they need libraries that no environment here has, or a disk" >&2; \
	"$$(cat build/python-cpu)" -m memopt demo --sim-python "$$(cat build/python-sim)" --json --no-page --force \
	    --output benchmarks/results/demo.json || failed=1; \
	$(PYTHON) benchmarks/readme_figures.py || failed=1; \
	exit $$failed

notebooks: build  ## executes the notebooks, in full, in place
	@$(ENVIRONMENT) notebook >build/python-notebook
	@cd notebooks && for n in *.ipynb; do echo "executing $$n" >&2; \
	    "$$(cat ../build/python-notebook)" ../tests/tooling/execute_notebook.py $$n || exit 1; done

docs:  ## the documentation's site, a warning an error: build/docs/index.html
	@python="$$($(ENVIRONMENT) docs)" && NO_MKDOCS_2_WARNING=1 "$$python" -m mkdocs build --quiet
	@echo build/docs/index.html

# ---- fuzzing ----------------------------------------------------------------------------------------------------------
FUZZ_SECONDS ?= 60
FUZZERS = $(patsubst tests/fuzz/%.c,%,$(wildcard tests/fuzz/fuzz_*.c))
CLANG ?= clang
# What they call, and what that calls.
FUZZED = $(wildcard csrc/base/*.c csrc/data/shared*.c) csrc/alloc/trace_text.c

fuzz:  ## each fuzzer under libFuzzer for FUZZ_SECONDS (60); needs clang
	@command -v $(CLANG) >/dev/null || { echo "fuzz: there is no $(CLANG) (Debian: apt-get install clang libclang-rt-14-dev)" >&2; exit 1; }
	@mkdir -p build/fuzz
	@for f in $(FUZZERS); do mkdir -p build/fuzz/$$f.corpus && echo "$$f: $(FUZZ_SECONDS) s" >&2 && \
	    $(CLANG) $(C_FLAGS) -g -O1 -DMO_LEVEL=3 -fsanitize=fuzzer,address,undefined tests/fuzz/$$f.c \
	        $(FUZZED) -o build/fuzz/$$f $(C_LIBRARIES) && \
	    build/fuzz/$$f -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 build/fuzz/$$f.corpus || exit 1; done

# ---- plain C: the modules and their tests, in a folder a variant --------------------------------------------------------
# build/c/plain/test_units is tests/c/test_units.c with every module below csrc/python; build/c/plain/sim/test_vmm is
# tests/c/sim/test_vmm.c with the simulated device, whose functions are CUDA's.
C_WARNINGS = -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Werror
C_FLAGS = -std=c11 -D_GNU_SOURCE -ffp-contract=off -Icsrc -I. -Itests/c $(C_WARNINGS)
C_LIBRARIES = -ldl -lpthread -lm

plain_FLAGS = -O1 -g1 -DMO_LEVEL=3
asan_FLAGS = -O1 -g -DMO_LEVEL=3 -fsanitize=address -fno-omit-frame-pointer
ubsan_FLAGS = -O1 -g -DMO_LEVEL=3 -fsanitize=undefined -fno-sanitize-recover=all
tsan_FLAGS = -O1 -g -DMO_LEVEL=3 -fsanitize=thread
# The extension's own (setup.py), for what is timed.
bench_FLAGS = -O2 -g1 -fPIC -fvisibility=hidden -fno-strict-aliasing -DMO_LEVEL=0
bench_HOT_FLAGS = -flto=auto
# For another machine, and run by qemu.
aarch64_CC = aarch64-linux-gnu-gcc
aarch64_FLAGS = -O1 -g1 -DMO_LEVEL=3

CORE = $(sort $(wildcard csrc/base/*.c csrc/driver/*.c csrc/alloc/*.c csrc/scaler/*.c csrc/optim/*.c csrc/loss/*.c \
	csrc/checkpoint/*.c csrc/transfer/*.c csrc/data/*.c csrc/confine/*.c))
SIM = $(sort $(wildcard csrc/simcuda/device_*.c csrc/simcuda/driver_*.c csrc/simcuda/runtime_*.c) $(wildcard csrc/simcuda/nvml.c \
	csrc/simcuda/kernel_bodies.c))

# What kernel_image.c embeds, the extension's too; made by nvcc where there is one.
KERNEL_MACROS = $(shell $(PYTHON) kernels/build_kernels.py --macros build/kernels)

define VARIANT
build/c/$(1)/core/%.o: %.c
	@mkdir -p $$(@D)
	$$(or $$($(1)_CC),$$(CC)) $$(C_FLAGS) $$($(1)_FLAGS) $$(if $$(filter csrc/base/% csrc/alloc/%,$$<),$$($(1)_HOT_FLAGS)) -fexceptions -MMD -MP -c $$< -o $$@
build/c/$(1)/core/csrc/driver/kernel_image.o: csrc/driver/kernel_image.c $$(wildcard kernels/*.cu*)
	@mkdir -p $$(@D)
	$$(or $$($(1)_CC),$$(CC)) $$(C_FLAGS) $$($(1)_FLAGS) $$(KERNEL_MACROS) -MMD -MP -c $$< -o $$@
build/c/$(1)/sim/%.o: %.c
	@mkdir -p $$(@D)
	$$(or $$($(1)_CC),$$(CC)) $$(C_FLAGS) $$($(1)_FLAGS) -DSIM_CUDA_MAJOR=13 -MMD -MP -c $$< -o $$@
build/c/$(1)/test_%: tests/c/test_%.c $$(wildcard tests/c/*.h) $$(CORE:%.c=build/c/$(1)/core/%.o)
	$$(or $$($(1)_CC),$$(CC)) $$(C_FLAGS) $$($(1)_FLAGS) -MMD -MP -MF $$@.d $$< $$(CORE:%.c=build/c/$(1)/core/%.o) -o $$@ -rdynamic $$(C_LIBRARIES)
build/c/$(1)/sim/test_%: tests/c/sim/test_%.c $$(wildcard tests/c/*.h) $$(SIM:%.c=build/c/$(1)/sim/%.o)
	$$(or $$($(1)_CC),$$(CC)) $$(C_FLAGS) $$($(1)_FLAGS) -DSIM_CUDA_MAJOR=13 -MMD -MP -MF $$@.d $$< $$(SIM:%.c=build/c/$(1)/sim/%.o) -o $$@ -rdynamic $$(C_LIBRARIES)
build/c/$(1)/fuzz/fuzz_%: tests/fuzz/fuzz_%.c tests/fuzz/random_input.h $$(FUZZED:%.c=build/c/$(1)/core/%.o)
	@mkdir -p $$(@D)
	$$(or $$($(1)_CC),$$(CC)) $$(C_FLAGS) $$($(1)_FLAGS) -DMEMOPT_RANDOM_INPUT $$< $$(FUZZED:%.c=build/c/$(1)/core/%.o) -o $$@ $$(C_LIBRARIES)
-include $$(wildcard build/c/$(1)/*.d build/c/$(1)/sim/*.d) $$(CORE:%.c=build/c/$(1)/core/%.d) $$(SIM:%.c=build/c/$(1)/sim/%.d)
endef
$(foreach variant,plain asan ubsan tsan bench aarch64,$(eval $(call VARIANT,$(variant))))

ALLOCATOR = $(filter csrc/base/% csrc/driver/% csrc/alloc/%,$(CORE))
build/c/bench/alloc_core: benchmarks/alloc_core.c $(ALLOCATOR:%.c=build/c/bench/core/%.o)
	$(CC) $(C_FLAGS) $(bench_FLAGS) -MMD -MP -MF $@.d $< $(ALLOCATOR:%.c=build/c/bench/core/%.o) -o $@ -rdynamic $(C_LIBRARIES)

# ---- style ------------------------------------------------------------------------------------------------------------
C_FILES = $(shell git ls-files '*.c' '*.h' '*.cu' '*.cuh')

lint: build  ## ruff, mypy, both compilers' warnings, clang-format, clang-tidy; says which tool is missing
	@$(ENVIRONMENT) lint >build/python-lint
	@$(PYTHON) tests/tooling/lint.py "$$(cat build/python-lint)"

format: build  ## rewrites Python and C in the project's style
	@$(ENVIRONMENT) lint >build/python-lint
	@"$$(cat build/python-lint)" -m ruff check --fix --quiet . ; "$$(cat build/python-lint)" -m ruff format --quiet .
	@clang-format -i $(C_FILES)

.PHONY: help build wheel release clean demo test environments test-c test-sim test-asan test-ubsan test-tsan test-aarch64 valgrind soak bench \
	notebooks docs fuzz lint format
