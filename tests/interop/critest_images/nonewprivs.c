// SPDX-License-Identifier: Apache-2.0
/* Tells who it runs as. It is root's and has the set-user-id bit, which no_new_privs takes away. */
#include <stdio.h>
#include <unistd.h>

int main(void)
{
	printf("Effective uid: %d\n", (int)geteuid());
	return 0;
}
