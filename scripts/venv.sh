# Sourced by the other scripts: goes to the repository's root and makes .venv with the exact versions of constraints.txt.
# What was installed is remembered in .venv, so that a second run starts at once.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\n== %s\n' "$*"; }

# The first interpreter that is new enough and can make virtual environments. PYTHON=... names another.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13}; do
    if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  echo "error: no Python of version 3.11 or newer with venv was found; install one (Debian: python3-venv), or set PYTHON" >&2
  return 1
}

# install_into_venv EXTRA: the package in editable form, with an extra of pyproject.toml ("" for none).
install_into_venv() {
  local extra=$1 python wanted
  local stamp=".venv/installed${extra:+-$extra}"
  if [ ! -x .venv/bin/python ]; then
    python=$(find_python)
    say "making .venv with $("$python" --version)"
    "$python" -m venv .venv
  fi
  wanted=$(cat pyproject.toml constraints.txt | cksum)
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    say "installing glm5ray${extra:+ with what its ${extra}s need} (versions of constraints.txt)"
    # compat: a path entry instead of an import hook, which a folder of the same name (the clone, seen from beside it) would hide
    .venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt \
      --config-settings editable_mode=compat -e ".${extra:+[$extra]}"
    if [ "$extra" = test ] && [ "$(uname)" = Linux ]; then
      # Its signatures and layouts are tested without a GPU; what it requires beside is compilers and libraries for one.
      .venv/bin/python -m pip install --disable-pip-version-check --no-deps --no-compile -c constraints.txt flashinfer-python
    fi
    printf '%s\n' "$wanted" >"$stamp"
  fi
}
