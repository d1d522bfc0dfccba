/* SPDX-License-Identifier: Apache-2.0
 *
 * The least that a VM and a container in it can cost: a static program that is in the bench's template.
 * It waits until a virtio-serial port of its name is plugged in, writes "ready", and obeys lines of it:
 *
 *   run    execute this program as a container: namespaces, mounts, a root of its own
 *   exec   execute this program in the container that was begun last
 *
 * Each is answered by "ok" once the program says so itself, or by "failed" with what failed.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define PORT "infranetes.floor\n"
#define OWN "/usr/sbin/infranetes-floor"
#define TELL 3 /* the descriptor by which an executed program says that it runs */

static void must(int result, const char *what) {
    if (result < 0) {
        dprintf(TELL, "failed: %s: %s\n", what, strerror(errno));
        _exit(1);
    }
}

/* Return whether this is the bench's own port. A port has its name soon after it has its device. */
static int is_own_port(const char *name) {
    char path[512], said[64] = "";
    snprintf(path, sizeof path, "/sys/class/virtio-ports/%s/name", name);
    for (int look = 0; look < 1000; look++) {
        int file = open(path, O_RDONLY | O_CLOEXEC);
        if (file >= 0) {
            ssize_t size = read(file, said, sizeof said - 1);
            close(file);
            return size > 0 && strcmp(said, PORT) == 0;
        }
        usleep(1000);
    }
    return 0;
}

/* Wait for the port. In a pod of the daemon's, end at the first disk. */
static int own_port(void) {
    char events[4096] __attribute__((aligned(8))), path[512];
    int watch = inotify_init1(IN_CLOEXEC);
    if (watch < 0 || inotify_add_watch(watch, "/dev", IN_CREATE) < 0)
        _exit(1);
    for (;;) {
        ssize_t size = read(watch, events, sizeof events);
        for (char *at = events; size > 0 && at < events + size;) {
            struct inotify_event *event = (struct inotify_event *)at;
            at += sizeof *event + event->len;
            if (event->len && strncmp(event->name, "sd", 2) == 0)
                _exit(0);
            if (!event->len || strncmp(event->name, "vport", 5) || !is_own_port(event->name))
                continue;
            snprintf(path, sizeof path, "/dev/%s", event->name);
            return open(path, O_RDWR | O_CLOEXEC);
        }
    }
}

static void become_container(void) {
    must(sethostname("floor", 5), "sethostname");
    must(mount("", "/", "", MS_REC | MS_PRIVATE, NULL), "private mounts");
    must(mount("tmpfs", "/mnt", "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755"), "the root");
    must(mkdir("/mnt/proc", 0755) | mkdir("/mnt/dev", 0755) | mkdir("/mnt/sys", 0755), "mkdir");
    must(close(open("/mnt/floor", O_CREAT | O_WRONLY, 0755)), "the program's file");
    must(mount(OWN, "/mnt/floor", "", MS_BIND, NULL), "the program");
    must(mount("proc", "/mnt/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL), "/proc");
    must(mount("tmpfs", "/mnt/dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=0755,size=64k"), "/dev");
    must(mount("sysfs", "/mnt/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY, NULL), "/sys");
    must(chdir("/mnt"), "chdir");
    must((int)syscall(SYS_pivot_root, ".", "."), "pivot_root");
    must(umount2(".", MNT_DETACH), "the old root");
    execl("/floor", "floor", "begun", "stays", (char *)NULL);
    must(-1, "exec");
}

static void join(pid_t container) {
    static const char *const kinds[] = {"mnt", "uts", "ipc", "pid"};
    int files[4];
    char path[64];
    for (int i = 0; i < 4; i++) {
        snprintf(path, sizeof path, "/proc/%d/ns/%s", container, kinds[i]);
        must(files[i] = open(path, O_RDONLY | O_CLOEXEC), path);
    }
    for (int i = 0; i < 4; i++)
        must(setns(files[i], 0), "setns");
}

/* Execute this program as a container, whose process stays. */
static pid_t run(void) {
    const int kinds = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID;
    pid_t first = (pid_t)syscall(SYS_clone, kinds | SIGCHLD, 0, 0, 0, 0);
    if (first == 0)
        become_container();
    return first;
}

/* Execute this program in a container. */
static pid_t exec_in(pid_t container) {
    pid_t helper = fork();
    if (helper != 0)
        return helper;
    join(container);
    pid_t first = fork(); /* a PID namespace that was joined is that of children */
    if (first == 0) {
        execl("/floor", "floor", "begun", (char *)NULL);
        must(-1, "exec");
    }
    waitpid(first, NULL, 0);
    _exit(0);
}

int main(int count, __attribute__((unused)) char **words) {
    if (count > 1) { /* executed by itself, in a container */
        must((int)write(TELL, "ok\n", 3), "say so");
        close(TELL);
        if (count > 2)
            pause();
        return 0;
    }
    dup2(STDIN_FILENO, TELL); /* nothing else gets this descriptor */
    int port = own_port(), container = 0;
    char line[64], said[256];
    dprintf(port, "ready\n");
    for (ssize_t size; (size = read(port, line, sizeof line)) > 0 || errno == EINTR;) {
        int told[2];
        if (pipe2(told, O_CLOEXEC) < 0)
            return 1;
        dup2(told[1], TELL);
        pid_t child = line[0] == 'r' ? (container = run()) : exec_in(container);
        dup2(STDIN_FILENO, TELL);
        close(told[1]);
        size = read(told[0], said, sizeof said);
        close(told[0]);
        if (line[0] != 'r')
            waitpid(child, NULL, 0);
        dprintf(port, "%.*s", size > 0 ? (int)size : 7, size > 0 ? said : "failed\n");
    }
    return 0;
}
