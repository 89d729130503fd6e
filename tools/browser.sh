#!/usr/bin/env bash
# Installs Debian's Chromium for the tests of the page. Where that is not possible it says so: those tests are skipped.
set -euo pipefail

for name in chromium chromium-browser google-chrome google-chrome-stable; do
  if path=$(command -v "$name"); then
    echo "the tests of the page use $path"
    exit 0
  fi
done
if [[ $(id -u) != 0 ]] || ! command -v apt-get > /dev/null; then
  echo "no Chromium here, and only root with apt-get could install one: the tests of the page will be skipped"
  exit 0
fi
echo "installing Chromium for the tests of the page"
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -y -qq -o DPkg::Lock::Timeout=120 --no-install-recommends chromium; } > /dev/null; then
  echo "Chromium could not be installed: the tests of the page will be skipped"
fi
