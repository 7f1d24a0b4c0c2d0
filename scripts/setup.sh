#!/bin/sh
# Make .venv ready for `make`: usage scripts/setup.sh PYTHON, from the repository root.
#
# Whatever stops it is said in ONE line with the next step; pip's own output goes to .venv/setup.log.
# POSIX sh, not Python, since the Python at hand may be missing or too old to parse a script.
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
        stop "there is no '$py'; install Python 3.11 or newer, $again (another name: make PY=/path/to/python3.12 ...)."
    "$py" -c "$usable" 2>/dev/null ||
        stop "'$py' is $("$py" --version 2>&1 | head -n 1), 3.11 or newer is needed; install one, $again (another name: make PY=/path/to/python3.12 ...)."
    "$py" -c 'import ensurepip, venv' 2>/dev/null ||
        stop "'$py' has no venv module; install it (Debian and Ubuntu: apt-get install python3-venv), $again."
    problem=$("$py" -m venv --clear .venv 2>&1) ||
        stop "'$py -m venv .venv' failed ($(echo "$problem" | tail -n 1)); check space and permissions of this folder, $again."
    [ -x .venv/bin/python ] || stop "'$py -m venv .venv' made nothing; is it a Python? $again."
fi

pip_install() {
    .venv/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --retries 2 "$@" >>"$log" 2>&1 && return
    if grep -q -i -E 'NewConnectionError|NameResolution|ConnectTimeout|Read ?Timeout|timed out|ProxyError|Max retries|Connection (refused|reset|aborted)|Network is unreachable' "$log"; then
        stop "pip reached no package index (details: $log); connect to the network, or name a mirror (PIP_INDEX_URL=...), $again."
    fi
    stop "pip failed: $(grep -E '(ERROR|[A-Za-z]Error):' "$log" | tail -n 1) (details: $log); fix that, $again."
}

echo "Setting up .venv (once; a minute or more: 1 GB with torch's CPU build, 3 GB with its CUDA build) ..."
: >"$log"
# The build backend first, by the pins in requirements-dev.txt: with it there, the editable packages
# need no build environment of their own each, which is most of pip's time otherwise.
# shellcheck disable=SC2046  # one word for each pin is what is wanted
pip_install $(grep -E '^(editables|hatchling)==' requirements-dev.txt)
pip_install --no-build-isolation -r requirements-dev.txt
# pip compiles 10,000 files on one core. Files that are for another Python stay as they are, as with pip.
.venv/bin/python -m compileall -q -j 0 .venv/lib >>"$log" 2>&1 || :
