# SPDX-License-Identifier: Apache-2.0
# Infranetes: build, test and run. Works on Debian 12 and 13 with only make and git there: what else a
# target needs is installed by apt (as root or through sudo; it says what) and into .venv.

PYTHON ?= python3
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
VENV_DONE := $(VENV)/.installed
# With what Infranetes itself needs, and no more.
VENV_RUN_DONE := $(VENV)/.installed-run
# What ruff and mypy look at; packages that do not exist yet are left out.
CODE := $(wildcard txgrpc infranetes infranetes_common infranetes_simulation vmserver tests bench demo delivery manual releasing proto setup.py twisted/plugins)
MYPY_CODE := $(wildcard txgrpc infranetes infranetes_common infranetes_simulation vmserver tests bench demo delivery manual releasing)

# Debian packages, by what they are for. Add to the list of the thing that needs it.
APT_BASE := python3 python3-venv ca-certificates protobuf-compiler
# Since Debian 13 docker.io is the engine alone.
APT_DOCKER := docker.io $(shell { . /etc/os-release && [ "$${VERSION_ID%%.*}" -ge 13 ] && echo docker-cli; } 2>/dev/null)
APT_TEST := lintian patchelf erofs-utils xfsprogs openssl procps iproute2 conntrack docker-registry busybox-static zstd curl openssh-server $(APT_DOCKER) crun conmon catatonit gcc libc6-dev systemd \
	nbdkit nbdkit-plugin-python libnbd-bin dnsmasq-base ovmf swtpm zsh isc-dhcp-client dhcpcd-base qemu-guest-agent
APT_RUN := skopeo qemu-system-x86 qemu-utils iproute2 nftables util-linux passwd
APT_DEMO := docker-registry busybox-static
# What critest's images are made from, and the containerd that the daemon is compared with.
APT_CONTAINERD := containerd runc containernetworking-plugins iptables
APT_CONFORMANCE := docker-registry gcc libc6-dev $(APT_CONTAINERD)
# What kubelet mounts volumes and reads disks with, the cluster's images are made with, and the packets' ways.
APT_CLUSTER := docker-registry busybox-static mmdebstrap debian-archive-keyring mount util-linux procps nftables \
	catatonit conmon crun \
	iproute2 conntrack
# What CRI-O is built with, and runs containers by.
APT_DELEGATES := gcc libc6-dev conmon $(APT_CONTAINERD)
APT_IMAGE := mmdebstrap e2fsprogs debian-archive-keyring
# What the node's page is looked at with, and its test has pods of.
APT_PAGE := chromium $(shell command -v npm >/dev/null || echo npm) novnc docker-registry busybox-static skopeo
# What clouds' disks are made with.
APT_DISK := fdisk e2fsprogs dosfstools mtools
# What guests for tests are made with: the kernels themselves are only unpacked.
APT_GUESTS := $(APT_DISK) busybox-static grub-common grub-pc-bin grub-efi-amd64-bin xorriso xz-utils qemu-utils
# What the packages need to be built is in debian/control; debian/make-deb asks for it.
APT_DEB := dpkg-dev fakeroot
# What an apt repository is made with.
APT_REPO := apt-utils gpg gpg-agent
# Debian's own releases of the libraries, for test-debian.
APT_DEBIAN_LIBS := python3-twisted python3-zope.interface python3-h2 python3-protobuf python3-attr \
	python3-cattr python3-cryptography python3-openssl python3-service-identity python3-treq \
	python3-zstandard python3-h11 python3-wsproto python3-jeepney python3-hypothesis python3-coverage python3-grpcio \
	python3-libcloud python3-prometheus-client python3-boto3 python3-pycdlib python3-pyvmomi python3-yaml \
	python3-jsonschema python3-matplotlib python3-pyte \
	python3-sphinx furo python3-myst-parser

# $(call need,PACKAGES): installs those that are not installed, and says which. Costs nothing when all are.
define need
@lacking=""; \
there=$$(dpkg-query -W -f '$${db:Status-Status} $${Package}\n' $(sort $(1)) 2>/dev/null | sed -n 's/^installed //p' | tr '\n' ' ' || :); \
for package in $(sort $(1)); do \
	case " $$there" in *" $$package "*) ;; *) lacking="$$lacking $$package" ;; esac; \
done; \
if [ -n "$$lacking" ]; then \
	command -v apt-get >/dev/null || { echo "This needs Debian's packages:$$lacking" >&2; exit 1; }; \
	sudo=""; if [ "$$(id -u)" != 0 ]; then sudo=sudo; \
		command -v sudo >/dev/null || { echo "Install as root: apt-get install$$lacking" >&2; exit 1; }; fi; \
	echo "Installing with apt, which takes up to two minutes:$$lacking"; \
	mkdir -p build; \
	[ -n "$$(find build/apt-updated -mmin -60 2>/dev/null)" ] || { $$sudo apt-get -qq update; touch build/apt-updated; }; \
	$$sudo env DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o Dpkg::Use-Pty=0 install --no-install-recommends $$lacking </dev/null >/dev/null; \
fi
endef

.PHONY: help
help: ## Show the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

# ---- Environment and generated files -------------------------------------------------------------

.PHONY: apt-base apt-test
apt-base:
	$(call need,$(APT_BASE))

apt-test: apt-base
	$(call need,$(APT_TEST) $(APT_CONTAINERD) $(APT_RUN) $(APT_IMAGE) $(APT_DISK) $(APT_GUESTS) $(APT_DEB) $(APT_REPO))

.PHONY: venv
venv: $(VENV_DONE) ## Make .venv with Infranetes and the tools of its tests

.PHONY: venv-run
venv-run: $(VENV_RUN_DONE)

$(VENV_RUN_DONE): setup.py txgrpc/pyproject.toml | apt-base
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Infranetes needs Python 3.11 or later, and $(PYTHON) is $$($(PYTHON) --version 2>&1): set PYTHON=" >&2; exit 1; }
	@[ -x $(BIN)/python ] || { echo "Making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "Installing into $(VENV), which takes up to a minute"
	@$(BIN)/pip install --quiet --no-compile --disable-pip-version-check --editable ./txgrpc --editable .
	@touch $@

$(VENV_DONE): setup.py | $(VENV_RUN_DONE)
	@echo "Installing into $(VENV) what tests need, which takes up to a minute"
	@$(BIN)/pip install --quiet --no-compile --disable-pip-version-check --editable ./txgrpc --editable '.[test,lint,bench]'
	@touch $@

.PHONY: proto
proto: infranetes_common/wire/cri.pyi ## Compile proto/ to descriptors, stubs and types

infranetes_common/wire/cri.pyi: $(wildcard proto/*.proto proto/*.py) | apt-base
	@$(PYTHON) proto/compile.py --stubs

# ---- Checks --------------------------------------------------------------------------------------

.PHONY: lint
lint: venv proto ## Check style, types, the picture of the rooms, and that tests over five seconds say why
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy $(MYPY_CODE)
	$(BIN)/python -m tests.harness.durations
	$(BIN)/python -m tests.docs.rooms --check

.PHONY: docs
docs: venv proto ## Build the site of the pages in build/site; fails for a link, command or key that is not there, and for a long page
	@$(BIN)/python -m tests --jobs 1 tests.docs.test_links tests.docs.test_reading tests.docs.test_commands \
		tests.docs.test_examples
	@$(BIN)/python -m manual

.PHONY: format
format: venv ## Rewrite the code in the project's style
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

.PHONY: rooms
rooms: venv ## Draw the picture of the rooms, docs/rooms.svg, again
	$(BIN)/python -m tests.docs.rooms

.PHONY: tools
tools: | apt-base ## Build crictl, critest, csi-sanity, vcsim and osnfs, and fetch cloud-init and what wheels are built with, which tests need, into build/
	@PYTHON=$(PYTHON) tests/interop/tools
	@tests/interop/cloud-init
	@$(PYTHON) -c 'from delivery import wheels; wheels.tools(wheels.TREE / "build" / "wheel-tools")'

# Another release of Kubernetes than the one that tests have, such as v1.34.4, for tests of clusters.
KUBERNETES ?=
export KUBERNETES
export INFRANETES_TEST_KUBERNETES := $(KUBERNETES)

.PHONY: vm-tools
vm-tools: venv proto apt-test image ## Fetch and make what tests with real VMs and of the packages need: nfs-ganesha, PostgreSQL, clean roots, disks of clouds; TESTS= picks some
	@tests/e2e/tools
	@$(AS_ROOT) env INFRANETES_TEST_IMAGES="$(IMAGE_DIR)" $(BIN)/python -m tests.e2e.roots $(TESTS)

.PHONY: cluster-tools
cluster-tools: | apt-base ## Build Kubernetes, etcd and CoreDNS into build/tools/kubernetes (once, ten minutes); KUBERNETES=v1.34.4: of another release
	@PYTHON=$(PYTHON) tests/cluster/tools

.PHONY: e2e-tools
e2e-tools: | apt-base ## Build Kubernetes' end-to-end suite into build/tools/kubernetes too
	@PYTHON=$(PYTHON) tests/cluster/tools e2e

.PHONY: delegate-tools
delegate-tools: | apt-base ## Build containerd 2 and CRI-O into build/tools (once, some minutes)
	$(call need,$(APT_DELEGATES))
	@PYTHON=$(PYTHON) tests/delegates/tools

.PHONY: promtool
promtool: | apt-base ## Build Prometheus' promtool into build/tools (once, some minutes)
	@PYTHON=$(PYTHON) tests/contrib/tools

.PHONY: helm
helm: | apt-base ## Build helm into build/tools (once, some minutes)
	@PYTHON=$(PYTHON) tests/contrib/helm

.PHONY: chart
chart: venv helm ## Make contrib/kubernetes/infranetes.yaml again of the chart in contrib/helm
	@PYTHON=$(BIN)/python tests/contrib/helm render

.PHONY: otelcol
otelcol: | apt-base ## Build OpenTelemetry's collector into build/tools (once, some minutes)
	@PYTHON=$(PYTHON) tests/interop/otelcol

# They wait for different things: downloads, the compiler, the guest's boot.
.PHONY: tools-and-image
tools-and-image: venv proto apt-test
ifeq ($(filter 0,$(shell id -u))$(shell command -v sudo),)
	@echo "No guest image is built, for which root or sudo is needed: the tests with VMs are skipped"
	@$(MAKE) --no-print-directory tools
else
	@$(MAKE) --no-print-directory --jobs 2 tools image test-guests
endif

.PHONY: test-guests
test-guests: venv proto apt-test ## Make the small VM images that tests boot, into /var/lib/infranetes/test-guests
	@$(AS_ROOT) $(BIN)/python -m tests.guests

.PHONY: test-guests-large
test-guests-large: test-guests image ## Make the VM images of Debian that tests at night boot, too
	@$(AS_ROOT) env INFRANETES_TEST_IMAGES="$(IMAGE_DIR)" $(BIN)/python -m tests.guests --large

# The tests, in tiers of which each holds the one before: docs/testing.md. TESTS= picks some.
RUN_TESTS = env INFRANETES_TEST_IMAGES="$(IMAGE_DIR)" $(BIN)/python -m tests

.PHONY: check test test-all test-nightly
check: venv proto ## Run every test that needs neither root nor another program
	@$(RUN_TESTS) --tier check $(TESTS)

test: venv proto apt-test tools-and-image ## Run all tests but those of VMs and clusters, and the life of one real VM; as root or with sudo
	@$(RUN_TESTS) --tier test $(TESTS)

test-all: venv proto apt-test tools vm-tools image image-docker test-guests ## Run all tests but those that take hours: with real VMs, too
	@$(AS_ROOT) $(RUN_TESTS) --tier all $(TESTS)

test-nightly: venv proto apt-test tools vm-tools image image-docker test-guests-large cluster-tools delegate-tools promtool helm otelcol ## Run all tests there are, soaks and clusters too, then Kubernetes' own suites: hours
	$(call need,$(APT_PAGE) $(APT_CLUSTER))
	@tests/interop/axe
	@PYTHON=$(PYTHON) tests/cluster/tools metrics
	@PYTHON=$(PYTHON) tests/cluster/tools storage
	@$(AS_ROOT) $(RUN_TESTS) --tier nightly $(TESTS)
	@$(MAKE) --no-print-directory conformance
	@$(MAKE) --no-print-directory kubernetes

.PHONY: test-vms
test-vms: venv proto apt-test tools image test-guests ## Run the tests with real VMs that have their turn today, and the one that the last day's change touches most; CI_DAY= another day
	@names="$(TESTS)"; [ -n "$$names" ] || names=$$($(BIN)/python -m tests.harness.turns vms); \
	$(MAKE) --no-print-directory vm-tools TESTS="$$names"; \
	case "$$names" in *docker*) $(MAKE) --no-print-directory image-docker;; esac; \
	$(AS_ROOT) $(RUN_TESTS) $$names

# today: leave out the tests of clusters that have other days.
DAY ?= all

.PHONY: test-debian
test-debian: proto apt-test tools ## Run the tests without VMs on Debian's own releases of the libraries
	$(call need,$(APT_DEBIAN_LIBS))
	@/usr/bin/python3 setup.py --quiet egg_info # plug-ins are found by what this writes
	@/usr/bin/python3 -m tests --tier test --without tests.e2e $(TESTS)

.PHONY: test-page
test-page: venv proto ## Have Debian's Chromium, which is installed for that, look at the pages of a node and a pod: live, by keys, hostile, in both modes, on a phone; and at a VM's screen by noVNC
	$(call need,$(APT_PAGE))
	@tests/interop/axe
	@$(BIN)/python -m tests --jobs 1 tests.infranetes.daemon.test_page tests.infranetes.monitoring.test_live_browser \
		tests.infranetes.monitoring.test_screens_browser \
		tests.manual.test_accessible

.PHONY: test-promtool test-otelcol
test-promtool: venv proto promtool helm ## Have Prometheus' promtool and helm, which are built first, judge what is in contrib/, and the daemon's metrics
	@$(BIN)/python -m tests --jobs 1 tests.contrib

test-otelcol: venv proto otelcol ## Have OpenTelemetry's collector, which is built first, take the daemon's spans
	@$(BIN)/python -m tests --jobs 1 tests.interop.test_otelcol

.PHONY: test-first-image
test-first-image: venv proto apt-test ## Install the packages in a booted Debian 12 and 13 and wait until each has built its guest image and run a pod in a VM, by autopkgtest; up to an hour; TESTS= picks some
	@$(AS_ROOT) $(BIN)/python -m tests --jobs 1 $(or $(TESTS),tests.e2e.first_image)

SUITE ?= trixie
DEMO ?= 0
FRESH ?=
# What the demo, and tests, need in a root of another release.
APT_SUITE_DEMO := $(APT_RUN) $(APT_DEMO)
APT_SUITE_TESTS = $(APT_TEST) $(APT_RUN) $(APT_IMAGE) $(APT_DISK) $(APT_DEBIAN_LIBS)

.PHONY: test-suite
test-suite: venv proto $(if $(filter-out 0,$(DEMO))$(TESTS),apt-run image) ## Build the packages on a release of Debian, SUITE=trixie or bookworm, run their unit tests and install them there; DEMO=1: the demo there instead, TESTS=: tests; FRESH=test: make that there, as on a fresh machine
	$(call need,mmdebstrap debian-archive-keyring iproute2 nftables util-linux)
	@$(AS_ROOT) $(BIN)/python -m tests.e2e.suites $(SUITE) --image-dir "$(IMAGE_DIR)" $(if $(FRESH),--make "$(FRESH)",$(if $(filter-out 0,$(DEMO)),\
		--demo --packages "$(APT_SUITE_DEMO)",$(if $(TESTS),--tests "$(TESTS)" --packages "$(APT_SUITE_TESTS)")))

.PHONY: test-cluster
test-cluster: venv proto apt-run tools cluster-tools image ## Run the tests in a Kubernetes of one node, and the workloads of the day; TESTS= picks some, DAY=today leaves out those that have other days
	$(call need,$(APT_CLUSTER) $(APT_CONTAINERD))
	@$(AS_ROOT) env INFRANETES_TEST_IMAGES="$(IMAGE_DIR)" $(BIN)/python -m tests --jobs 1 \
		$(if $(filter today,$(DAY)),$$($(BIN)/python -m tests.cluster.slices)) \
		$(or $(TESTS),tests.cluster tests.docs.test_kubelet $$($(BIN)/python -m tests.workloads))

.PHONY: test-chart
test-chart: venv proto apt-test tools cluster-tools helm image ## Install by the chart on a node of a Kubernetes cluster, run a VM pod there, and remove it again; TESTS= picks some
	$(call need,$(APT_CLUSTER) $(APT_OCI))
	@$(AS_ROOT) env INFRANETES_TEST_IMAGES="$(IMAGE_DIR)" $(BIN)/python -m tests.e2e.roots tests.chart
	@$(AS_ROOT) env INFRANETES_TEST_IMAGES="$(IMAGE_DIR)" $(BIN)/python -m tests --jobs 1 $(or $(TESTS),tests.chart)

.PHONY: test-delegates
test-delegates: venv proto apt-test tools delegate-tools image ## Run the tests with containerd 2 and CRI-O as the delegate; TESTS= picks some
	@$(AS_ROOT) env INFRANETES_TEST_IMAGES="$(IMAGE_DIR)" $(BIN)/python -m tests --jobs 1 $(or $(TESTS),tests.delegates)

.PHONY: workloads
workloads: venv proto apt-run tools cluster-tools image ## Run workloads as people have them in a Kubernetes of one node; RUNTIME=mixed: beside containerd; TESTS= picks some
	$(call need,$(APT_CLUSTER) $(APT_CONTAINERD))
	@PYTHON=$(PYTHON) tests/cluster/tools metrics
	@PYTHON=$(PYTHON) tests/cluster/tools storage
	@$(AS_ROOT) env INFRANETES_TEST_IMAGES="$(IMAGE_DIR)" INFRANETES_TEST_RUNTIME="$(RUNTIME)" $(BIN)/python -m tests --jobs 1 $(or $(TESTS),tests.workloads)

# 1: of a daemon before containerd.
DELEGATE ?= 0
CONFORMANCE ?= $(if $(filter-out 0,$(DELEGATE)),--delegate all,--beside containerd)
CONFORMANCE_JSON ?= build/conformance.json

.PHONY: conformance
conformance: venv proto apt-run tools image ## Judge by Kubernetes' own suite, beside containerd; DELEGATE=1: before containerd, too; CONFORMANCE=FLAGS
	$(call need,$(APT_CONFORMANCE))
	@$(AS_ROOT) $(BIN)/python -m tests.interop.critest --json "$(CONFORMANCE_JSON)" \
		--image-dir "$(IMAGE_DIR)" $(CONFORMANCE)

FOCUS ?=
SKIP ?=
PARALLEL ?= 2
E2E_JSON ?= build/e2e.json

.PHONY: e2e
e2e: export E2E_FOCUS = $(value FOCUS)
e2e: export E2E_SKIP = $(value SKIP)
e2e: venv proto apt-run tools e2e-tools image ## Judge by Kubernetes' end-to-end suite in a cluster; FOCUS=REGEX, SKIP=REGEX, PROXY=1, NODES=2, PROVIDER=cloud, STORAGE=1
	$(call need,$(APT_CLUSTER) zstd)
	@$(if $(filter-out 0,$(STORAGE)),PYTHON=$(PYTHON) tests/cluster/tools storage)
	@$(AS_ROOT) $(BIN)/python -m tests.conformance --json "$(E2E_JSON)" --image-dir "$(IMAGE_DIR)" \
		--provider "$(PROVIDER)" --parallel "$(PARALLEL)" --focus "$$E2E_FOCUS" --skip "$$E2E_SKIP" --nodes "$(NODES)" $(if $(filter-out 0,$(PROXY)),--proxy) \
		$(if $(filter-out 0,$(STORAGE)),--storage)

SLICE ?= 1/1
KUBERNETES_JSON ?= build/kubernetes
# containerd to compare with, and one of: mixed, infranetes.
RUNTIMES ?= containerd mixed

.PHONY: kubernetes
kubernetes: venv proto apt-run tools e2e-tools image ## Judge by what Kubernetes asks of clusters and nodes, beside containerd; hours: SLICE=K/N, SLICE=today/N
	$(call need,$(APT_CLUSTER) $(APT_CONFORMANCE) zstd)
	@for runtime in $(RUNTIMES); do $(AS_ROOT) $(BIN)/python -m tests.conformance --judge --runtime $$runtime \
		--proxy --slice "$(SLICE)" --json "$(KUBERNETES_JSON)-$$runtime.json" --image-dir "$(IMAGE_DIR)" \
		--parallel "$(PARALLEL)"; done; \
		$(BIN)/python -m tests.conformance.compare $(RUNTIMES:%="$(KUBERNETES_JSON)"-%.json)

MINUTES ?= 15
BUDGET ?= 0.25

.PHONY: record-cloud
record-cloud: venv proto ## Record what PROVIDER=aws or gcp answers to one pod VM's life, scrubbed, with CONFIG=FILE; costs money, and asks first (YES=1: does not)
	@$(BIN)/python -m tests.support.clouds.recordings "$(PROVIDER)" --config "$(CONFIG)" --minutes "$(MINUTES)" --budget "$(BUDGET)" \
		$(if $(filter-out 0,$(YES)),--yes)

# ---- Run: demo, run, image -----------------------------------------------------------------------

AS_ROOT := $(if $(filter 0,$(shell id -u)),,sudo --preserve-env=INFRANETES_TEST_KUBERNETES,INFRANETES_TEST_GUESTS)
SOCKET ?= /run/infranetes/infranetes.sock

.PHONY: apt-run
apt-run: apt-base
	$(call need,$(APT_RUN))

QEMU_USER := infranetes-qemu
IMAGE_DIR ?= /var/lib/infranetes/guest
# What runs containers in the guest image: docker, oci, or both (oci, and Docker for pods that choose it).
CONTAINERS ?= $(shell sed -n 's/^DEFAULT_CONTAINERS = "\(.*\)"$$/\1/p' infranetes/guest/recipe.py)
IMAGE_CONTAINERS = --containers "$(CONTAINERS)"

.PHONY: image
image: venv-run proto apt-run ## Build the guest image, unless it is there, with CONTAINERS=; its packages are made first
	$(call need,$(APT_IMAGE) $(APT_DEB))
	@getent passwd $(QEMU_USER) >/dev/null || \
		$(AS_ROOT) useradd --system --home-dir /nonexistent --shell /usr/sbin/nologin $(QEMU_USER)
	@DEB_BUILD_OPTIONS=nocheck debian/make-deb >/dev/null
	@$(AS_ROOT) $(BIN)/infranetes-guest build --debs dist --image-dir "$(IMAGE_DIR)" $(IMAGE_CONTAINERS)

.PHONY: image-docker
image-docker: ## Build the guest image of Docker alone too, beside the other
	@$(MAKE) --no-print-directory image CONTAINERS=docker IMAGE_DIR="$(IMAGE_DIR)-docker"

# All of it at once: apt takes some seconds to begin.
.PHONY: apt-demo
apt-demo:
	$(call need,$(APT_BASE) $(APT_RUN) $(APT_IMAGE) $(APT_DEB) $(APT_DEMO))

.PHONY: demo
demo: export DEMO_COMMAND = $(value COMMAND)
# Docker's engine takes a third of the image and of its build, and the demo doesn't need it.
demo: IMAGE_CONTAINERS = $(if $(filter command environment,$(origin CONTAINERS)),--containers "$(CONTAINERS)",--containers oci --or-more)
demo: apt-demo venv-run proto image ## Show a pod VM from its image to its end; COMMAND='echo hello' runs that in it
	@$(AS_ROOT) $(BIN)/python -m demo --image-dir "$(IMAGE_DIR)" --command "$$DEMO_COMMAND"

.PHONY: recording
recording: venv apt-demo ## Record make demo and draw docs/demo.svg of it; DRAW=1: draw the recording that is there again
	@$(BIN)/python -m demo.recording $(if $(filter-out 0,$(DRAW)),--draw)

.PHONY: pictures
pictures: venv proto ## Draw docs/metrics-page.png and docs/metrics-pod.png of a node with simulated VMs, by Debian's Chromium
	$(call need,$(APT_PAGE))
	@PICTURES="$(CURDIR)/docs" $(BIN)/python -m tests --jobs 1 tests.infranetes.daemon.test_page.PicturesTests

.PHONY: run
run: venv-run proto apt-run image ## Keep the daemon in the foreground; SOCKET=PATH, CONFIG=FILE
	@exec $(AS_ROOT) $(BIN)/twistd --nodaemon --pidfile= infranetes --listen "$(SOCKET)" \
		$(if $(CONFIG),--config "$(CONFIG)")

PROXY ?= 0
POLICIES ?= 0
PINNING ?= 0
# 1: with volumes of pods' own, made for claims.
STORAGE ?= 0
NODES ?= 1
# cloud: simulated VMs that are like a cloud's.
PROVIDER ?= qemu
# Of the cluster's kubelet. mixed: pods of containerd beside VMs. containerd: no VMs at all.
RUNTIME ?= infranetes

.PHONY: cluster
cluster: venv proto apt-run tools cluster-tools image ## Keep a Kubernetes of one node up until Ctrl-C; NODES=2: of two; RUNTIME=mixed: beside containerd; PROVIDER=cloud: without KVM; PROXY=1, POLICIES=1: with kube-proxy, NetworkPolicies; STORAGE=1: with volumes; PINNING=1: with static CPU and memory managers
	$(call need,$(APT_CLUSTER) $(if $(filter infranetes,$(RUNTIME)),,$(APT_CONTAINERD)))
	@$(if $(filter-out 0,$(STORAGE)),PYTHON=$(PYTHON) tests/cluster/tools storage)
	@exec $(AS_ROOT) $(BIN)/python -m tests.cluster --image-dir "$(IMAGE_DIR)" --nodes "$(NODES)" --provider "$(PROVIDER)" --runtime "$(RUNTIME)" \
		$(if $(filter-out 0,$(PROXY)),--proxy) $(if $(filter-out 0,$(POLICIES)),--policies) $(if $(filter-out 0,$(PINNING)),--pinning) \
		$(if $(filter-out 0,$(STORAGE)),--storage)

# ---- Packages: deb -------------------------------------------------------------------------------

.PHONY: deb
deb: ## Build the Debian packages into dist/
	$(call need,$(APT_DEB))
	@debian/make-deb

# An OCI archive, and what it is made with.
OCI ?= dist/infranetes.oci.tar
APT_OCI := mmdebstrap debian-archive-keyring patchelf

.PHONY: oci
oci: venv-run proto ## Build the image that installs Infranetes on nodes, an OCI archive in OCI=FILE; GUEST=1: with the guest image of IMAGE_DIR= in it
	$(call need,$(APT_OCI))
	@$(if $(filter-out 0,$(GUEST)),$(MAKE) --no-print-directory image)
	@mkdir -p "$(dir $(OCI))"
	@$(AS_ROOT) $(BIN)/python -m delivery.oci "$(OCI)" $(if $(filter-out 0,$(GUEST)),--guest "$(IMAGE_DIR)")

.PHONY: wheel
wheel: venv-run proto ## Build what pip installs, infranetes and txgrpc, as wheels and sdists, into dist/; URL=ADDRESS of the repository for their links
	@INFRANETES_URL="$(URL)" $(BIN)/python -m delivery.wheels dist

VERSION ?=
DRY ?= 0

# Who signs: a key of gpg's, by its fingerprint; without one, a key that is made for it.
KEY ?=
REPO ?= dist/repo

.PHONY: repo
repo: deb ## Make an apt repository of the packages for Debian 12 and 13 in dist/repo, signed; KEY=FINGERPRINT of gpg's, REPO=DIRECTORY
	$(call need,$(APT_REPO))
	@KEY="$(KEY)" debian/make-repo "$(REPO)"

.PHONY: release
release: venv ## Make the release VERSION=0.3.0: commits, a tag and dist/release; DRY=1: the artifacts alone; KEY=FINGERPRINT of gpg's signs the tag
	@$(BIN)/python -m releasing "$(VERSION)" $(if $(filter-out 0,$(DRY)),--dry-run) $(if $(KEY),--key "$(KEY)")

# ---- Figures: bench ------------------------------------------------------------------------------

BENCHES ?=
BENCH_JSON ?= build/bench.json
# auto: KVM where it works. kvm and tcg are forced.
ACCELERATOR ?= auto

.PHONY: bench
bench: venv proto ## Take the figures: a table, and JSON in BENCH_JSON=; BENCHES= picks some, and only what these need is made
	@needs=$$($(BIN)/python -m bench --needs $(BENCHES)); [ -z "$$needs" ] || $(MAKE) --no-print-directory $$needs
	@$(AS_ROOT) $(BIN)/python -m bench --json "$(BENCH_JSON)" --accelerator "$(ACCELERATOR)" $(BENCHES)

.PHONY: ratios
ratios: venv ## Draw docs/performance/ratios.svg, and write its table on the page, again from docs/ratios.json
	@$(BIN)/python -m bench.ratios

# ---- Bugs put in on purpose ----------------------------------------------------------------------

MODULES ?= txgrpc
SAMPLE ?= 60
SEED ?= 1

.PHONY: mutants
mutants: venv proto ## Put bugs into MODULES=, a SAMPLE= of each chosen by SEED=, and show which no test notices; MUTANTS=FLAGS
	@$(AS_ROOT) $(BIN)/python -m tests.mutants --sample "$(SAMPLE)" --seed "$(SEED)" $(MUTANTS) $(MODULES)

# ---- Cleaning ------------------------------------------------------------------------------------

.PHONY: clean
clean: ## Remove everything that was made here, .venv too
	@for each in build/demo build/tests; do [ ! -e $$each ] || $(AS_ROOT) rm -rf $$each; done # root's, too
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .hypothesis _trial_temp*
	rm -f infranetes_common/wire/descriptors.binpb infranetes_common/wire/*.pyi infranetes_common/wire/*_rpcs.py twisted/plugins/dropin.cache
	find . '(' -name __pycache__ -o -name '*.pyc' ')' -prune -exec rm -rf {} +
