/* Stands between SQLite and the disk (LD_PRELOAD): records what is written and synced under one directory, and can
 * make the n-th of these calls fail with EIO. tests/chaos/test_power_cuts.py makes disks of the record. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int record_fd = -1, fail_after = -1, calls;

/* Watch the files under FEDEVAL_SHIM_DIR only; return a file's name there, or NULL. */
static const char *watched(int fd, char *path) {
    const char *directory = getenv("FEDEVAL_SHIM_DIR");
    char link[64];
    if (directory == NULL || fd == record_fd) return NULL;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0) return NULL;
    path[length] = 0;
    size_t prefix = strlen(directory);
    return strncmp(path, directory, prefix) == 0 && path[prefix] == '/' ? path + prefix + 1 : NULL;
}

static void note(char kind, const char *name, int64_t offset, const void *data, uint32_t length) {
    static ssize_t (*real)(int, const void *, size_t);
    if (real == NULL) real = dlsym(RTLD_NEXT, "write");
    if (record_fd < 0) return;
    char header[PATH_MAX + 64];
    int size = snprintf(header, sizeof header, "%c %s %lld %u\n", kind, name, (long long)offset, length);
    if (real(record_fd, header, size) != size || (length && real(record_fd, data, length) != (ssize_t)length)) abort();
}

/* Called by the test: where to record (-1: nowhere), and after how many calls one fails (-1: none). */
void shim_arm(int fd, int after) { record_fd = fd; fail_after = after; calls = 0; }
int shim_calls(void) { return calls; }

static int fails(const char *name) {
    if (strcmp(name, "acknowledged") == 0 || strcmp(name, "head") == 0) return 0;
    if (calls++ != fail_after) return 0;
    errno = EIO;
    return 1;
}

ssize_t pwrite64(int fd, const void *data, size_t length, off64_t offset) {
    static ssize_t (*real)(int, const void *, size_t, off64_t);
    char path[PATH_MAX];
    if (real == NULL) real = dlsym(RTLD_NEXT, "pwrite64");
    const char *name = watched(fd, path);
    if (name == NULL) return real(fd, data, length, offset);
    if (fails(name)) return -1;
    ssize_t wrote = real(fd, data, length, offset);
    if (wrote > 0) note('w', name, offset, data, wrote);
    return wrote;
}
ssize_t pwrite(int fd, const void *data, size_t length, off_t offset) { return pwrite64(fd, data, length, offset); }

ssize_t write(int fd, const void *data, size_t length) {
    static ssize_t (*real)(int, const void *, size_t);
    char path[PATH_MAX];
    if (real == NULL) real = dlsym(RTLD_NEXT, "write");
    const char *name = watched(fd, path);
    if (name == NULL) return real(fd, data, length);
    if (fails(name)) return -1;
    int64_t offset = lseek(fd, 0, SEEK_CUR);
    ssize_t wrote = real(fd, data, length);
    if (wrote > 0) note('w', name, offset, data, wrote);
    return wrote;
}

static int sync_with(const char *symbol, int fd) {
    int (*real)(int) = dlsym(RTLD_NEXT, symbol);
    char path[PATH_MAX];
    const char *name = watched(fd, path);
    if (name == NULL) return real(fd);
    if (fails(name)) return -1;
    int result = real(fd);
    if (result == 0) note('s', name, 0, NULL, 0);
    return result;
}
int fsync(int fd) { return sync_with("fsync", fd); }
int fdatasync(int fd) { return sync_with("fdatasync", fd); }

int ftruncate64(int fd, off64_t length) {
    static int (*real)(int, off64_t);
    char path[PATH_MAX];
    if (real == NULL) real = dlsym(RTLD_NEXT, "ftruncate64");
    const char *name = watched(fd, path);
    int result = real(fd, length);
    if (name != NULL && result == 0) note('t', name, length, NULL, 0);
    return result;
}
int ftruncate(int fd, off_t length) { return ftruncate64(fd, length); }
