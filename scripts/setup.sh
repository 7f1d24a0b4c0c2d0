#!/bin/sh
# Create or update .venv for `make`. Usage, from the repository root: scripts/setup.sh PYTHON
#
# Each error is reported in one line with the next step; the output of pip goes to .venv/setup.log.
# This is a POSIX shell script because Python may be missing or too old to parse a script.
set -u
py=$1
log=.venv/setup.log

stop() {
    echo "set-up stopped: $*" >&2
    exit 1
}

again="then run make again"
usable='import sys; sys.exit(sys.version_info < (3, 11))'

if ! .venv/bin/python -c "import pip; $usable" 2>/dev/null; then
    command -v "$py" >/dev/null 2>&1 ||
        stop "'$py' was not found; install Python 3.11 or newer, $again (another name: make PY=/path/to/python3.12 ...)."
    "$py" -c "$usable" 2>/dev/null ||
        stop "'$py' is $("$py" --version 2>&1 | head -n 1), but 3.11 or newer is required; install it, $again (another name: make PY=/path/to/python3.12 ...)."
    "$py" -c 'import ensurepip, venv' 2>/dev/null ||
        stop "'$py' has no venv module; install it (Debian and Ubuntu: apt-get install python3-venv), $again."
    problem=$("$py" -m venv --clear .venv 2>&1) ||
        stop "'$py -m venv .venv' failed ($(echo "$problem" | tail -n 1)); check the free space and permissions of this folder, $again."
    [ -x .venv/bin/python ] || stop "'$py -m venv .venv' created no environment; check that '$py' is Python, $again."
fi

pip_install() {
    .venv/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --retries 2 "$@" >>"$log" 2>&1 && return
    if grep -q -i -E 'NewConnectionError|NameResolution|ConnectTimeout|Read ?Timeout|timed out|ProxyError|Max retries|Connection (refused|reset|aborted)|Network is unreachable' "$log"; then
        stop "pip could not reach a package index (details: $log); connect to the network or set a mirror (PIP_INDEX_URL=...), $again."
    fi
    stop "pip failed: $(grep -E '(ERROR|[A-Za-z]Error):' "$log" | tail -n 1) (details: $log); fix the cause, $again."
}

echo "Setting up .venv (once; a minute or more: 1 GB with torch's CPU build, 3 GB with its CUDA build) ..."
: >"$log"
# Install the pinned build backend first, so that the editable packages need no separate build
# environments, which would take most of the time.
# shellcheck disable=SC2046  # each pin is one argument
pip_install $(grep -E '^(editables|hatchling)==' requirements-dev.txt)
pip_install --no-build-isolation -r requirements-dev.txt
# Compile on all cores, which pip does not. Like pip, ignore files that this Python cannot compile.
.venv/bin/python -m compileall -q -j 0 .venv/lib >>"$log" 2>&1 || :
