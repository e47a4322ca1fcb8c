# Sourced by bench/run, bench/scale and bench/features: makes the harness's own virtual environment on first use
# and sets $python to its interpreter. Nothing is written outside $PEERS_CACHE.
bench="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PEERS_CACHE="${PEERS_CACHE:-${TMPDIR:-/tmp}/penstock-bench}"
export PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH="$bench"
venv="$PEERS_CACHE/venv/base"
python="$venv/bin/python"
pins="$(cat "$bench/requirements.txt")"
if [ "$(cat "$venv/.pins" 2>/dev/null || true)" != "$pins" ]; then
    mkdir -p "$PEERS_CACHE/venv"
    rm -rf "$venv"
    "${PEERS_PYTHON:-python3}" -m venv "$venv"
    "$python" -m pip install -qq --disable-pip-version-check -r "$bench/requirements.txt"
    printf '%s\n' "$pins" > "$venv/.pins"
fi
