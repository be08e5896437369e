/* A stand-in for VMware's libvixDiskLib, which VMware alone gives out: the entry points of its documentation («Virtual Disk
 * Development Kit Programming Guide») that nbdkit's vddk plugin calls, over a file of this machine. Nothing of VMware's is in it.
 *
 * It does as it is told by the file `stand-in`, lines of KEY=VALUE in the folder that InitEx is given:
 *
 *     server port user password thumbprint vm snapshot      what a caller must say, else it is refused as VDDK refuses; *: anything
 *     datastore       the folder that stands for every datastore: of «[any] vm/disk.vmdk» the bytes are in vm/disk-flat.vmdk
 *     transports      the modes that it knows, first the one it takes by itself: nbdssl:nbd
 *     connect, open   a VixError that the call fails with
 *     read_fails_at   the byte whose read fails, with the VixError read_error
 *     log             where each call is noted
 *
 * Errors have VIX's numbers and words.
 */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef uint64_t VixError;
typedef void Say(const char *format, va_list words);
typedef void Done(void *data, VixError result);

enum {
    OK = 0, FAIL = 1, INVALID_ARG = 3, FILE_NOT_FOUND = 4, FILE_ACCESS_ERROR = 13, FILE_ALREADY_LOCKED = 15,
    HOST_USER_PERMISSIONS = 3014, CANNOT_CONNECT_TO_HOST = 18000, ASYNC = 25000,
};
enum { SECTOR = 512, CHUNK_SECTORS = 128, CREDENTIALS_BY_USER = 1, READ_ONLY = 4 };

/* As the library's callers lay them out in memory. */
struct parameters {
    char *vm, *server, *thumbprint;
    long reserved1;
    int credentials;
    union {
        struct { char *user, *password; } by_user;
        struct { char *cookie, *user, *key; } by_session;
    } said;
    uint32_t port, nfc_port;
    char *reserved2;
    char reserved3[8];
    void *reserved4;
    struct { char *id, *datastore, *snapshot; } object;
    int kind;
};
struct geometry { uint32_t cylinders, heads, sectors; };
struct info {
    struct geometry bios, physical;
    uint64_t sectors;
    int adapter, links;
    char *parent, *uuid;
    uint32_t logical_sector, physical_sector;
};
struct block { uint64_t offset, length; };
struct blocks { uint32_t count; struct block at[]; };
struct disk { int file; uint64_t bytes; const char *mode; };

static char told[16384];
static Say *warn_function;

static const char *setting(const char *key) {
    static _Thread_local char value[4096];
    size_t length = strlen(key);
    for (const char *line = told; *line; line += strcspn(line, "\n"), line += *line == '\n')
        if (strncmp(line, key, length) == 0 && line[length] == '=') {
            snprintf(value, sizeof value, "%.*s", (int)strcspn(line + length + 1, "\n"), line + length + 1);
            return value;
        }
    return "";
}

static void note(const char *format, ...) {
    FILE *log = fopen(setting("log"), "a");
    if (!log)
        return;
    va_list words;
    va_start(words, format);
    vfprintf(log, format, words);
    va_end(words);
    fclose(log);
}

static void warn(const char *format, ...) {
    va_list words;
    va_start(words, format);
    if (warn_function)
        warn_function(format, words);
    va_end(words);
}

static int is(const char *key, const char *value) {
    return value != NULL && (strcmp(setting(key), "*") == 0 || strcmp(setting(key), value) == 0);
}

VixError VixDiskLib_InitEx(uint32_t major, uint32_t minor, Say *log, Say *warning, Say *panic, const char *folder, const char *configuration) {
    char path[4096];
    (void)major, (void)minor, (void)log, (void)panic, (void)configuration;
    warn_function = warning;
    snprintf(path, sizeof path, "%s/stand-in", folder ? folder : "");
    FILE *file = fopen(path, "r");
    if (!file)
        return FILE_NOT_FOUND;
    told[fread(told, 1, sizeof told - 1, file)] = 0;
    fclose(file);
    note("init\n");
    return OK;
}

void VixDiskLib_Exit(void) { note("exit\n"); }

const char *VixDiskLib_ListTransportModes(void) { return "file:san:hotadd:nbdssl:nbd"; }

char *VixDiskLib_GetErrorText(VixError error, const char *locale) {
    static const struct { VixError code; const char *words; } texts[] = {
        {OK, "The operation was successful"},
        {INVALID_ARG, "One of the parameters was invalid"},
        {FILE_NOT_FOUND, "A file was not found"},
        {FILE_ACCESS_ERROR, "You do not have access rights to this file"},
        {FILE_ALREADY_LOCKED, "The file is already in use"},
        {HOST_USER_PERMISSIONS, "Insufficient permissions in the host operating system"},
        {CANNOT_CONNECT_TO_HOST, "Cannot connect to host"},
        {14009, "The server refused connection"},
        {2338, "NBD_ERR_NETWORK_CONNECT"},
    };
    (void)locale;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (texts[i].code == error)
            return strdup(texts[i].words);
    return strdup("Unknown error");
}

void VixDiskLib_FreeErrorText(char *text) { free(text); }

struct parameters *VixDiskLib_AllocateConnectParams(void) { return calloc(1, sizeof(struct parameters)); }

void VixDiskLib_FreeConnectParams(struct parameters *parameters) { free(parameters); }

/* The first of the wanted modes that there is; NULL: none. */
static const char *mode_of(const char *wanted) {
    static _Thread_local char have[256], list[256];
    char *rest, *one;
    snprintf(have, sizeof have, ":%s:", setting("transports"));
    snprintf(list, sizeof list, "%s", wanted && *wanted ? wanted : setting("transports"));
    for (one = strtok_r(list, ":", &rest); one; one = strtok_r(NULL, ":", &rest)) {
        char within[64];
        snprintf(within, sizeof within, ":%s:", one);
        if (strstr(have, within))
            return one;
    }
    return NULL;
}

VixError VixDiskLib_ConnectEx(const struct parameters *p, char read_only, const char *snapshot, const char *modes, void **connection) {
    char port[16];
    note("connect vm=%s snapshot=%s port=%u read_only=%d modes=%s\n", p->vm, snapshot ? snapshot : "", p->port, read_only, modes ? modes : "");
    snprintf(port, sizeof port, "%u", p->port);
    if (atoll(setting("connect")))
        return atoll(setting("connect"));
    if (!is("server", p->server) || !is("port", port))
        return CANNOT_CONNECT_TO_HOST;
    if (!is("thumbprint", p->thumbprint)) {
        warn("VixDiskLibVim: Failed to verify SSL certificate: actual thumbprint=%s expected=%s\n", setting("thumbprint"), p->thumbprint);
        return CANNOT_CONNECT_TO_HOST;
    }
    if (p->credentials != CREDENTIALS_BY_USER || !is("user", p->said.by_user.user) || !is("password", p->said.by_user.password))
        return HOST_USER_PERMISSIONS;
    if (!is("vm", p->vm) || !is("snapshot", snapshot) || !read_only)
        return INVALID_ARG;
    *connection = strdup(modes ? modes : "");
    return OK;
}

VixError VixDiskLib_Disconnect(void *connection) {
    note("disconnect\n");
    free(connection);
    return OK;
}

VixError VixDiskLib_Open(void *connection, const char *path, uint32_t flags, void **handle) {
    struct stat found;
    const char *mode = mode_of(connection);
    note("open %s flags=%u mode=%s\n", path, flags, mode ? mode : "");
    if (atoll(setting("open")))
        return atoll(setting("open"));
    const char *within = strstr(path, "] ");
    if (!within || strlen(within) < sizeof "] .vmdk" || !(flags & READ_ONLY))
        return INVALID_ARG;
    if (!mode) {
        warn("No transport modes availble to access disk %s.\n", path);
        return FAIL;
    }
    char flat[8192];
    within += strlen("] ");
    snprintf(flat, sizeof flat, "%s/%.*s-flat.vmdk", setting("datastore"), (int)(strlen(within) - strlen(".vmdk")), within);
    struct disk *disk = calloc(1, sizeof *disk);
    disk->file = open(flat, O_RDONLY);
    if (disk->file < 0 || fstat(disk->file, &found) < 0) {
        free(disk);
        return FILE_NOT_FOUND;
    }
    disk->bytes = found.st_size;
    disk->mode = strdup(mode);
    *handle = disk;
    return OK;
}

const char *VixDiskLib_GetTransportMode(struct disk *disk) { return disk->mode; }

VixError VixDiskLib_Close(struct disk *disk) {
    close(disk->file);
    free((char *)disk->mode);
    free(disk);
    return OK;
}

VixError VixDiskLib_GetInfo(struct disk *disk, struct info **info) {
    *info = calloc(1, sizeof **info);
    (*info)->sectors = disk->bytes / SECTOR;
    (*info)->adapter = 3;
    (*info)->links = 1;
    (*info)->logical_sector = (*info)->physical_sector = SECTOR;
    return OK;
}

void VixDiskLib_FreeInfo(struct info *info) { free(info); }

VixError VixDiskLib_Read(struct disk *disk, uint64_t start, uint64_t sectors, unsigned char *into) {
    const char *fails = setting("read_fails_at");
    uint64_t at = start * SECTOR, bytes = sectors * SECTOR;
    if (*fails && at <= strtoull(fails, NULL, 10) && strtoull(fails, NULL, 10) < at + bytes)
        return atoll(setting("read_error"));
    return pread(disk->file, into, bytes, at) == (ssize_t)bytes ? OK : FAIL;
}

VixError VixDiskLib_ReadAsync(struct disk *disk, uint64_t start, uint64_t sectors, unsigned char *into, Done *done, void *data) {
    done(data, VixDiskLib_Read(disk, start, sectors, into));
    return ASYNC;
}

/* A disk that is read is never written: these are here since the plugin looks for them. */
VixError VixDiskLib_Write(void *disk, uint64_t start, uint64_t sectors, const unsigned char *from) {
    (void)disk, (void)start, (void)sectors, (void)from;
    return FILE_ACCESS_ERROR;
}
VixError VixDiskLib_WriteAsync(void *disk, uint64_t start, uint64_t sectors, const unsigned char *from, Done *done, void *data) {
    (void)done, (void)data;
    return VixDiskLib_Write(disk, start, sectors, from);
}
VixError VixDiskLib_Create(void *connection, const char *path, const void *parameters, void *progress, void *data) {
    (void)connection, (void)path, (void)parameters, (void)progress, (void)data;
    return FILE_ACCESS_ERROR;
}
VixError VixDiskLib_Flush(void *disk) { (void)disk; return OK; }
VixError VixDiskLib_Wait(void *disk) { (void)disk; return OK; }

/* By chunks of 64 KiB; what is all zeros was never allocated. */
VixError VixDiskLib_QueryAllocatedBlocks(struct disk *disk, uint64_t start, uint64_t sectors, uint64_t chunk, struct blocks **list) {
    static const unsigned char zeros[CHUNK_SECTORS * SECTOR];
    unsigned char some[CHUNK_SECTORS * SECTOR];
    if (chunk != CHUNK_SECTORS || start % chunk || sectors % chunk)
        return INVALID_ARG;
    struct blocks *found = calloc(1, sizeof *found + (sectors / chunk + 1) * sizeof *found->at);
    for (uint64_t at = start; at < start + sectors && at * SECTOR < disk->bytes; at += chunk) {
        ssize_t got = pread(disk->file, some, sizeof some, at * SECTOR);
        if (got > 0 && memcmp(some, zeros, got)) {
            found->at[found->count].offset = at;
            found->at[found->count++].length = got / SECTOR;
        }
    }
    note("allocated %llu+%llu: %u\n", (unsigned long long)start, (unsigned long long)sectors, found->count);
    *list = found;
    return OK;
}
VixError VixDiskLib_FreeBlockList(struct blocks *list) { free(list); return OK; }
