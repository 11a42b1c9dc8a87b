#!/usr/bin/env bash
# Installs Debian's Slurm without starting it, as tests start their own. Reports if that is impossible.
set -euo pipefail
if [ -x /usr/sbin/slurmctld ] && [ -x /usr/sbin/slurmd ] && [ -x /usr/sbin/munged ]; then
    exit
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "no Slurm here, and Debian's packages cannot be installed: the tests that need it say why they are skipped"
    exit
fi
refuse=/usr/sbin/policy-rc.d  # keeps dpkg from starting services
if [ ! -e $refuse ]; then
    printf '#!/bin/sh\nexit 101\n' >$refuse
    chmod +x $refuse
    trap 'rm -f $refuse' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
words=$(mktemp)
install() {
    timeout 180 apt-get install -y -qq --no-install-recommends slurm-wlm slurm-wlm-basic-plugins munge
}
if ! { install || { timeout 180 apt-get update -qq && install; }; } >"$words" 2>&1; then
    echo "Debian's Slurm cannot be installed here, and the tests that need it are skipped; apt-get's last words:"
    tail -n 3 "$words"
fi
rm -f "$words"
