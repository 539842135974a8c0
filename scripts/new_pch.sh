#!/bin/sh
# Launches the compilation of a precompiled header: new_pch.sh COMPILER ... -o HEADER.gch ...
#
# An older HEADER.gch goes first. ccache would take it for what the source includes, and not look at the headers that it was
# made of: after a change of those it gave back what another tree had made beside the same file.
for argument; do
  [ "$before" != -o ] || rm -f "$argument"
  before="$argument"
done
exec "$@"
