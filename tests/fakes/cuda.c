/* A CUDA driver and an NCCL without a card, for the P2P test: libcuda.so.1 and libnccl.so.2 in one.
 *
 * Device memory is a file of the folder FAKE_CUDA, so that another process can open it; kernels run at once, in
 * the calling process, and so does a graph. FAKE_CUDA_FAULT plays a broken fabric, by word:
 *   mirror   writes to another card land in a private copy (NCCL#2335)
 *   none     the driver gives no access to another card (a stock GeForce)
 *   full     no device memory
 *   crash    the first all-reduce ends the process
 *   stuck    the communicator never comes up
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef uint32_t u32;
typedef uint64_t u64;

static const char *folder(void) { return getenv("FAKE_CUDA"); }
static int fault(const char *name) {
    const char *word = getenv("FAKE_CUDA_FAULT");
    return word && !strcmp(word, name);
}

/* ------------------------------------------------------------------ memory */
struct part { u64 at, size; char name[32]; };
static struct part parts[64];
static int made;

static u64 map(const char *name, u64 size, int flags) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder(), name);
    int fd = open(path, O_RDWR | O_CREAT, 0600);
    if (fd < 0 || ftruncate(fd, (off_t)size)) return 0;
    void *at = mmap(0, size, PROT_READ | PROT_WRITE, flags, fd, 0);
    close(fd);
    return at == MAP_FAILED ? 0 : (u64)at;
}

int cuInit(unsigned flags) { return flags; }
int cuGetErrorString(int code, const char **text) {
    *text = code == 2 ? "out of memory" : code == 217 ? "peer access is not supported" : "played";
    return 0;
}
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal > 7 ? 101 : 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(u64)(device + 1); return 0; }
int cuCtxSetCurrent(void *context) { return context ? 0 : 201; }
int cuStreamCreate(void **stream, unsigned flags) { *stream = (void *)1; return flags == 1 ? 0 : 1; }
int cuStreamSynchronize(void *stream) { return stream ? 0 : 1; }
int cuDeviceCanAccessPeer(int *can, int one, int other) { *can = one != other && !fault("none"); return 0; }

int cuMemAlloc_v2(u64 *at, size_t size) {
    struct part *part = &parts[made++ % 64];
    if (fault("full")) return 2;
    snprintf(part->name, sizeof part->name, "m%d-%d", (int)getpid(), made);
    part->size = size;
    part->at = *at = map(part->name, size, MAP_SHARED);
    return *at ? 0 : 2;
}
int cuMemFree_v2(u64 at) {
    for (int i = 0; i < 64; i++)
        if (parts[i].at == at) return munmap((void *)at, parts[i].size);
    return 1;
}
struct handle { char bytes[64]; };
int cuIpcGetMemHandle(struct handle *handle, u64 at) {
    for (int i = 0; i < 64; i++)
        if (parts[i].at == at) {
            memset(handle, 0, sizeof *handle);
            snprintf(handle->bytes, 64, "%s %llu", parts[i].name, (unsigned long long)parts[i].size);
            return 0;
        }
    return 1;
}
int cuIpcOpenMemHandle_v2(u64 *at, struct handle handle, unsigned flags) {
    char name[32];
    unsigned long long size;
    if (flags != 1) return 1;
    if (sscanf(handle.bytes, "%31s %llu", name, &size) != 2) return 400;
    *at = map(name, size, fault("mirror") ? MAP_PRIVATE : MAP_SHARED);
    return *at ? 0 : 217;
}
int cuIpcCloseMemHandle(u64 at) { return at ? 0 : 1; }
int cuMemsetD8Async(u64 at, unsigned char value, size_t size, void *stream) {
    memset((void *)at, value, size);
    return stream ? 0 : 1;
}
int cuMemsetD32Async(u64 at, u32 value, size_t words, void *stream) {
    for (size_t i = 0; i < words; i++) ((u32 *)at)[i] = value;
    return stream ? 0 : 1;
}
int cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t size, void *stream) {
    memcpy((void *)to, (void *)from, size);
    return stream ? 0 : 1;
}
int cuMemcpyDtoH_v2(void *to, u64 from, size_t size) { memcpy(to, (void *)from, size); return 0; }

/* ------------------------------------------------------------------ kernels of p2p.cu */
struct call { char name[16]; int blocks; u64 arg[8]; };
static struct call calls[4096];
static int recording, recorded;

static u64 now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (u64)t.tv_sec * 1000000000 + (u64)t.tv_nsec;
}
static void meet(volatile u32 *mine, volatile u32 *peer, u32 round, u64 limit, u32 *late) {
    __atomic_store_n(peer, round, __ATOMIC_SEQ_CST);
    for (u64 start = now(); __atomic_load_n(mine, __ATOMIC_SEQ_CST) < round; usleep(20))
        if (now() - start > limit) { ++*late; return; }
}
static void reduce(struct call *c) {
    u32 *data = (u32 *)c->arg[0], *flags = (u32 *)c->arg[1], *other = (u32 *)c->arg[2], *theirs = (u32 *)c->arg[3];
    u32 *state = (u32 *)c->arg[4], words = (u32)c->arg[5], rank = (u32)c->arg[6];
    u32 round = state[2] + 1;
    if (state[1]) return;
    for (u32 i = 0; i < words; i++) data[i] = i * 2654435761u + round * 40503u + rank * 0x10000001u;
    meet(&flags[0], &theirs[0], round, c->arg[7], &state[1]);
    for (u32 i = 0; i < words; i++)
        if (data[i] + other[i] != 2 * (i * 2654435761u + round * 40503u) + 0x10000001u) state[0]++;
    meet(&flags[64], &theirs[64], round, c->arg[7], &state[1]);
    for (int block = 0; block < c->blocks; block++) state[2 + block] = round;
}
static void carry_out(struct call *c) {
    u32 *at = (u32 *)c->arg[0], *found = (u32 *)c->arg[4], mul = (u32)c->arg[2], add = (u32)c->arg[3];
    if (!strcmp(c->name, "reduce")) { reduce(c); return; }
    for (u64 i = 0; i < c->arg[1]; i++) {
        if (!strcmp(c->name, "fill")) at[i] = (u32)i * mul + add;
        else if (at[i] != (u32)i * mul + add) {
            found[0]++;
            if (i < found[1]) found[1] = (u32)i;
        }
    }
}
int cuModuleLoadData(void **module, const char *text) {
    *module = (void *)1;
    return strstr(text, ".entry fill") && strstr(text, ".entry check") && strstr(text, ".entry reduce") ? 0 : 200;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = strdup(name);
    return module && !recording ? 0 : 900;
}
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
                   unsigned shared, void *stream, void **places, void **extra) {
    static const char *kinds[][2] = {{"fill", "qqdd"}, {"check", "qqddq"}, {"reduce", "qqqqqddq"}};
    struct call call = {0};
    if (y != 1 || z != 1 || ty != 1 || tz != 1 || shared || !stream || extra || !threads) return 1;
    call.blocks = (int)x;
    snprintf(call.name, sizeof call.name, "%s", (char *)function);
    for (int k = 0; k < 3; k++)
        for (int i = 0; !strcmp(kinds[k][0], call.name) && kinds[k][1][i]; i++)
            call.arg[i] = kinds[k][1][i] == 'q' ? *(u64 *)places[i] : *(u32 *)places[i];
    if (recording) calls[recorded++ % 4096] = call;
    else carry_out(&call);
    return 0;
}
int cuStreamBeginCapture_v2(void *stream, int mode) { recording = 1; return stream && mode == 1 ? 0 : 1; }
int cuStreamEndCapture(void *stream, void **graph) { recording = 0; *graph = (void *)1; return stream ? 0 : 1; }
int cuGraphInstantiateWithFlags(void **whole, void *graph, unsigned long long flags) {
    *whole = (void *)1;
    return graph && !flags ? 0 : 1;
}
int cuGraphLaunch(void *graph, void *stream) {
    if (recording) return 900;
    for (int i = 0; i < recorded; i++) carry_out(&calls[i]);
    return graph && stream ? 0 : 1;
}

/* ------------------------------------------------------------------ NCCL */
struct id { char bytes[128]; };
struct shared { volatile u32 here[2][8], left[2][8]; };
static struct shared *board;
static u32 *slots, my_rank, all, turn;
#define SLOT (256u << 20)

const char *ncclGetErrorString(int code) { return code ? "played" : "no error"; }
int ncclGetVersion(int *version) { *version = 22907; return 0; }
int ncclGetUniqueId(struct id *id) {
    memset(id, 0, sizeof *id);
    snprintf(id->bytes, 128, "n%d", (int)getpid());
    return 0;
}
int ncclCommInitRank(void **comm, int ranks, struct id id, int rank) {
    char name[160];
    if (fault("stuck")) pause();
    board = (struct shared *)map(id.bytes, sizeof *board, MAP_SHARED);
    snprintf(name, sizeof name, "%s-data", id.bytes);
    slots = (u32 *)map(name, (u64)ranks * SLOT, MAP_SHARED);
    my_rank = (u32)rank, all = (u32)ranks;
    *comm = (void *)1;
    const char *off = getenv("NCCL_P2P_DISABLE");
    FILE *log = fopen(getenv("NCCL_DEBUG_FILE"), "w");
    if (!log) return 3;
    fprintf(log, "fake:1:1 [%d] NCCL INFO Channel 00/0 : %d[%d] -> %d[%d] via %s\n", rank, rank, rank, (rank + 1) % ranks,
           (rank + 1) % ranks, (off && !strcmp(off, "1")) || fault("none") ? "SHM/direct/direct" : "P2P/CUMEM");
    fclose(log);
    return board && slots && strcmp(getenv("NCCL_NVLS_ENABLE"), "1") ? 0 : 2;
}
static void everybody(volatile u32 *counts) {
    __atomic_add_fetch(&counts[0], 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&counts[0], __ATOMIC_SEQ_CST) < all * turn) usleep(20);
}
int ncclAllReduce(const u32 *from, u32 *to, size_t words, int type, int sum, void *comm, void *stream) {
    if (type != 3 || sum || !comm || !stream || words * 4 > SLOT) return 4;
    if (fault("crash")) raise(SIGSEGV);
    turn++;
    memcpy((char *)slots + (u64)my_rank * SLOT, from, words * 4);
    everybody(board->here[0]);
    for (size_t i = 0; i < words; i++) {
        u32 total = 0;
        for (u32 r = 0; r < all; r++) total += ((u32 *)((char *)slots + (u64)r * SLOT))[i];
        to[i] = total;
    }
    everybody(board->left[0]);
    return 0;
}
int ncclCommDestroy(void *comm) { return comm ? 0 : 4; }
