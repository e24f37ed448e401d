# Chromium from the system's packages, unless a browser of that kind is there. Playwright's own download is not used.
for name in chromium chromium-browser google-chrome; do
  command -v "$name" >/dev/null 2>&1 && exit 0
done
if command -v apt-get >/dev/null 2>&1; then
  as_root=""
  [ "$(id -u)" = 0 ] || as_root="sudo -n"
  log=$(mktemp)
  { $as_root apt-get update && $as_root apt-get install --yes --no-install-recommends chromium; } >"$log" 2>&1 && exit 0
  tail -n 3 "$log" >&2
fi
echo "error: the browser tests need Chromium, and it could not be installed with apt-get; install it and run 'make test-browser' again" >&2
exit 1
