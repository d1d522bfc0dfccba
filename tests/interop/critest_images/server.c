// SPDX-License-Identifier: Apache-2.0
/* A web server of one page for the images that critest expects nginx and httpd in.
 *
 *     nginx [PORT]
 *
 * As nginx does, it calls itself a "master process" and writes its number to /var/run/NAME.pid. */
#include <libgen.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

static const char answer[] =
	"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 17\r\nConnection: close\r\n\r\n"
	"<p>It works.</p>\n";

static void end(int number)
{
	(void)number;
	_exit(0);
}

int main(int argc, char **argv)
{
	char title[256], pid_file[256], request[4096];
	char *port = argc > 1 ? argv[1] : "80";
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = INADDR_ANY};
	struct sigaction ends = {.sa_handler = end};
	int one = 1, listener;
	FILE *file;

	if (argv[0][0] == '/') { /* once more, under the title that nginx gives itself */
		snprintf(title, sizeof title, "%s: master process %s", basename(strdup(argv[0])), argv[0]);
		execl(argv[0], title, port, (char *)NULL);
		perror(argv[0]);
		return 1;
	}
	argv[0][strcspn(argv[0], ":")] = '\0';
	snprintf(pid_file, sizeof pid_file, "/var/run/%s.pid", argv[0]);
	sigaction(SIGTERM, &ends, NULL);
	sigaction(SIGINT, &ends, NULL);
	sigaction(SIGQUIT, &ends, NULL);
	signal(SIGPIPE, SIG_IGN);
	listener = socket(AF_INET, SOCK_STREAM, 0);
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
	address.sin_port = htons((unsigned short)atoi(port));
	if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 16)) {
		perror("listen");
		return 1;
	}
	printf("%s: listening on port %s\n", argv[0], port);
	fflush(stdout);
	argv[0][strlen(argv[0])] = ':';
	if ((file = fopen(pid_file, "w")) != NULL) {
		fprintf(file, "%d\n", (int)getpid());
		fclose(file);
	}
	for (;;) {
		int client = accept(listener, NULL, NULL);
		if (client < 0)
			continue;
		if (read(client, request, sizeof request) > 0 && write(client, answer, sizeof answer - 1) > 0)
			shutdown(client, SHUT_WR);
		while (read(client, request, sizeof request) > 0)
			;
		close(client);
	}
}
