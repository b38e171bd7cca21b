/* As much of libcuda as cuda_driver.py calls, over this process's own memory: whether arguments arrive as C has them. */
#include <stdint.h>
#include <string.h>

typedef struct { unsigned char reserved[64]; } Handle;
typedef struct { unsigned char bytes[16]; } Uuid;

enum { INVALID = 1, NOT_READY = 600, NO_CONTEXT = 201, SIZE = 1 << 16 };
static unsigned char memory[SIZE] __attribute__((aligned(4096)));
static int context, stream, depth, events, queries;
#define NEEDS(what) if (!(what)) return INVALID
#define NEEDS_CONTEXT if (depth != 1) return NO_CONTEXT

int cuInit(unsigned flags) { return flags; }
int cuGetErrorString(int code, const char **text) { *text = code == NO_CONTEXT ? "no context" : "told so"; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 10 + ordinal; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGetUuid_v2(Uuid *uuid, int device) { memset(uuid, device, sizeof *uuid); return 0; }
int cuDeviceCanAccessPeer(int *can, int device, int peer) { *can = device == 10 && peer == 11; return 0; }
int cuDevicePrimaryCtxRetain(void **ctx, int device) { *ctx = &context; return device != 10; }
int cuDevicePrimaryCtxRelease_v2(int device) { return device != 10; }
int cuCtxPushCurrent_v2(void *ctx) { depth++; return ctx != &context; }
int cuCtxPopCurrent_v2(void **ctx) { depth--; *ctx = &context; return 0; }
int cuStreamCreate(void **made, unsigned flags) { NEEDS_CONTEXT; *made = &stream; return flags != 1; }
int cuStreamDestroy_v2(void *made) { NEEDS_CONTEXT; return made != &stream; }
int cuEventCreate(void **event, unsigned flags) { NEEDS_CONTEXT; events++; *event = &events; return flags != 2; }
int cuEventRecord(void *event, void *on) { NEEDS_CONTEXT; return event != &events || on != &stream; }
int cuEventQuery(void *event) { NEEDS_CONTEXT; NEEDS(event == &events); return queries++ ? 0 : NOT_READY; }
int cuEventDestroy_v2(void *event) { NEEDS_CONTEXT; NEEDS(event == &events); events--; return 0; }

int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t address) {
    NEEDS_CONTEXT;
    *base = (uint64_t)memory;
    *size = SIZE;
    return address < *base || address >= *base + SIZE;
}

int cuMemcpyAsync(uint64_t to, uint64_t from, size_t count, void *on) {
    NEEDS_CONTEXT;
    NEEDS(on == &stream);
    memcpy((void *)to, (void *)from, count);
    return 0;
}

int cuIpcGetMemHandle(Handle *handle, uint64_t address) {
    NEEDS_CONTEXT;
    memset(handle, 0xFF, sizeof *handle);
    memcpy(handle->reserved + 8, &address, sizeof address);
    return address != (uint64_t)memory;
}

int cuIpcOpenMemHandle_v2(uint64_t *address, Handle handle, unsigned flags) {
    NEEDS_CONTEXT;
    NEEDS(flags == 1 && handle.reserved[0] == 0xFF && handle.reserved[63] == 0xFF);
    memcpy(address, handle.reserved + 8, sizeof *address);
    return 0;
}

int cuIpcCloseMemHandle(uint64_t address) { NEEDS_CONTEXT; return address != (uint64_t)memory; }

/* Of the test. */
uint64_t stub_memory(void) { return (uint64_t)memory; }
int stub_events(void) { return events; }
