#!@HOME@/usr/bin/dash
# SPDX-License-Identifier: Apache-2.0
# The tree's nft: Debian 12's, or Debian 13's where the other can't read what is on the node.
#
# Debian 12's is killed by SIGSEGV when it reads a set that nft 1.1 or a newer one has made, and it reads those of all
# tables before it changes anything. Debian 13's would do to others' old nft on the node what that set does, so it
# makes no sets where there are none of a newer one.
programs=@HOME@/usr/libexec/nft
# So that it is killed once only until the node is booted again.
marker=${INFRANETES_NFT_MARKER:-/run/infranetes/newer-nft}
if [ ! -e "$marker" ]; then
	(ulimit -c 0; "$programs/older/nft" -c delete table ip infranetes-none; exit $?) </dev/null >/dev/null 2>&1
	if [ $? -lt 128 ]; then exec "$programs/older/nft" "$@"; fi
	(: >"$marker") 2>/dev/null
fi
exec "$programs/newer/nft" "$@"
