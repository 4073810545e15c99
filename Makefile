# Every target sets up what it needs on first use; the next time that takes a tenth of a second.
# How, and which Python is used: infra/environment.py.
#
# make ends with 2, whatever the status of what it ran. So `make grade` ends with 0 also where an exercise did
# not pass, which the last lines say, and with 2 where it could not grade. Programs that want to know call `grade`.

PYTHON ?= python3
JOBS ?= 3
ARGS ?=
ENVIRONMENT = python=$$($(PYTHON) -m infra.environment)

.PHONY: help lab grade train test floor lessons book bench

help:
	@echo "make lab       open the course in JupyterLab      ARGS='--no-browser' on a remote machine"
	@echo "make grade     grade your work                    ARGS='PATH' for one notebook or .py file"
	@echo "make train     train with your code               LESSON=08 RANKS=2 ARGS='--parallel data_parallel'"
	@echo "make test      prove the course                   ARGS='-k name', JOBS=3; the second time, what has changed"
	@echo "make floor     grade the solutions on the oldest torch that the course allows, and on Colab's versions"
	@echo "make lessons   build the notebooks                LESSON=08, FORCE=1"
	@echo "make book      build the site of the course       .book/site/index.html"
	@echo "make bench     measure speed                      BENCH=tests/bench/NAME.py"
	@echo "PYTHON=python3.12 chooses the Python that .venv is made with"

lab:
	@$(ENVIRONMENT) && "$$python" -m infra.lab $(ARGS)

grade:
	@$(ENVIRONMENT) && { "$$python" -m grader $(ARGS) || { status=$$?; test $$status -eq 1 || exit $$status; }; }

RANKS ?= 1
TORCHRUN = $(if $(filter-out 1,$(RANKS)),-m nanogpt.ranks --nproc-per-node $(RANKS))
train: # LESSON=08 is for that lesson's notebook as the implementation; ranks have a core each, as torchrun wants it
	@$(ENVIRONMENT) && $(if $(TORCHRUN),OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}) \
		"$$python" $(TORCHRUN) -m nanogpt.train $(ARGS) \
		$(if $(LESSON),--implementation $(wildcard lessons/$(LESSON)_*/*.ipynb))

test: # each worker takes the next test when it has ended one; tests wait a good deal, so three fill two cores
	@$(ENVIRONMENT) && "$$python" -m pytest -p tests.unchanged -n $(JOBS) --dist load --maxschedchunk 1 $(ARGS)

floor: # in an environment of its own
	@$(PYTHON) -m infra.floor $(ARGS)

lessons:
	@$(ENVIRONMENT) && "$$python" -m infra.lessons $(LESSON) $(if $(FORCE),--force)

book: # Sphinx is in an environment of its own
	@$(ENVIRONMENT) && "$$python" -m infra.book

BENCH ?= $(filter-out %/__init__.py,$(sort $(wildcard tests/bench/*.py)))
bench: # each is a program that prints what it measures
	@$(ENVIRONMENT) && for program in $(BENCH); do \
		echo "== $$program"; "$$python" -m $$(echo $${program%.py} | tr / .) $(ARGS) || exit; done
