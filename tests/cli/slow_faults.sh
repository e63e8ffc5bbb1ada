#!/usr/bin/env bash
# tests/cli/slow_faults.sh: every operation on files of a save and of a load fails in every way, and every 17th allocation
# of each program (of the trainers of texts every 119th, of those of images every 221st).
cd "$(dirname "$0")" || exit 1
KNAP_FAULTS_EVERY=1 exec bash faults.sh
