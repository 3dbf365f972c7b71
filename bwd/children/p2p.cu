// Kernels of the P2P test. p2p.ptx is made of this file, and the driver compiles that for the card at hand:
//   nvcc -ptx -arch=compute_80 p2p.cu -o - | grep -v '^//' | sed 's/^\.version .*/.version 7.8/' > p2p.ptx
// Words of 32 bits; a pattern is i * mul + add for word i.
typedef unsigned int u32;
typedef unsigned long long u64;

#define SPREAD 2654435761u  // Knuth's multiplicative hash: neighbours differ in all bits
#define ROUND 40503u
#define RANK 0x10000001u
#define ENDS 64             // flags of the second barrier begin here

extern "C" __global__ void fill(u32 *out, u64 words, u32 mul, u32 add) {
    u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += step) out[i] = (u32)i * mul + add;
}

// found[0]: words that differ; found[1]: the lowest of them (set to all ones before).
extern "C" __global__ void check(const u32 *in, u64 words, u32 mul, u32 add, u32 *found) {
    u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += step) {
        if (in[i] == (u32)i * mul + add) continue;
        atomicAdd(&found[0], 1u);
        atomicMin(&found[1], (u32)i);
    }
}

static __device__ u64 now() {
    u64 ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

// Tell the other side, then wait for its word. A wait without an end would leave the card busy with no
// process to end: after `limit` nanoseconds it is given up and counted.
static __device__ void meet(u32 *mine, u32 *peer, u32 round, u64 limit, u32 *late) {
    __threadfence_system();
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(peer)), "r"(round) : "memory");
    u64 start = now();
    u32 seen;
    for (;;) {
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(__cvta_generic_to_global(mine)) : "memory");
        if (seen >= round) return;
        if (now() - start > limit) {
            atomicAdd(late, 1u);
            return;
        }
    }
}

// One all-reduce of two ranks as vLLM's custom one does it: write own data, meet, read the peer's over P2P,
// meet. state[0]: wrong sums, state[1]: waits given up, state[2 + block]: rounds done.
extern "C" __global__ void reduce(u32 *data, u32 *flags, const u32 *peer_data, u32 *peer_flags, u32 *state, u32 words,
                                  u32 rank, u64 limit) {
    u32 block = blockIdx.x;
    u32 round = state[2 + block] + 1;
    if (*(volatile u32 *)&state[1]) return;
    u32 first = block * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    for (u32 i = first; i < words; i += step) data[i] = i * SPREAD + round * ROUND + rank * RANK;
    __syncthreads();
    if (threadIdx.x == 0) meet(&flags[block], &peer_flags[block], round, limit, &state[1]);
    __syncthreads();
    for (u32 i = first; i < words; i += step) {
        u32 other;
        asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(other) : "l"(__cvta_generic_to_global(&peer_data[i])) : "memory");
        u32 sum = data[i] + other;
        if (sum != 2 * (i * SPREAD + round * ROUND) + RANK) atomicAdd(&state[0], 1u);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        meet(&flags[ENDS + block], &peer_flags[ENDS + block], round, limit, &state[1]);
        state[2 + block] = round;
    }
}
