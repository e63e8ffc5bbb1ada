#!/usr/bin/env bash
# tests/cli/slow_kills.sh: 1,000 kills at random moments of a run that saves every other step (KNAP_KILLS: how many):
# nothing is lost, and the run's bits are those of the undisturbed one.
. "$(dirname "$0")/lib.sh"
command -v python3 >/dev/null || skip "no python3"
[ -x "$BUILD/models/train_gpt" ] || skip "build/models/train_gpt is not built"
exec python3 "$ROOT/tests/cli/faults.py" --build "$BUILD" --count "${KNAP_KILLS:-1000}" --seed "${KNAP_KILLS_SEED:-1}" kills
