/* The part of NCCL's ABI that the fake exports. -DREAL_HEADERS includes nccl.h, so that
 * the compiler compares our definitions with NVIDIA's declarations. */
#ifndef FAKE_ABI_NCCL_H
#define FAKE_ABI_NCCL_H

#include <limits.h>
#include <stddef.h>

#ifdef REAL_HEADERS
#include <nccl.h>
#else

#include "abi_cuda.h"

typedef CUstream cudaStream_t;
typedef struct ncclComm *ncclComm_t;
typedef struct ncclWindow_vidmem *ncclWindow_t;
typedef struct {
    char internal[128];
} ncclUniqueId;

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
} ncclResult_t;

/* New versions only add members at the end; size says which members the caller has. */
typedef struct {
    size_t size;
    unsigned int magic;
    unsigned int version;
    int blocking;
    int cgaClusterSize;
    int minCTAs;
    int maxCTAs;
    const char *netName;
    int splitShare;
} ncclConfig_t;

typedef enum {
    ncclSum = 0,
    ncclProd = 1,
    ncclMax = 2,
    ncclMin = 3,
    ncclAvg = 4,
    ncclNumOps = 5,
    ncclMaxRedOp = 0x7fffffff,
} ncclRedOp_t;

typedef enum {
    ncclInt8 = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclUint64 = 5,
    ncclFloat16 = 6,
    ncclFloat32 = 7,
    ncclFloat64 = 8,
    ncclBfloat16 = 9,
    ncclFloat8e4m3 = 10,
    ncclFloat8e5m2 = 11,
    ncclNumTypes = 12,
} ncclDataType_t;

typedef enum { ncclScalarDevice = 0, ncclScalarHostImmediate = 1 } ncclScalarResidence_t;

#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_SPLIT_NOCOLOR -1
#define NCCL_API_MAGIC 0xcafebeef
#define NCCL_WIN_COLL_SYMMETRIC 0x01
#define NCCL_WIN_REQUIRED_ALIGNMENT 4096

#endif

#ifndef NCCL_FAKE_VERSION
#define NCCL_FAKE_VERSION 22907
#endif
/* Version codes have four digits up to 2.8. */
#define VERSION_SINCE(major, minor, patch)                                       \
    (NCCL_FAKE_VERSION >= ((minor) <= 8 ? (major)*1000 + (minor)*100 + (patch)   \
                                        : (major)*10000 + (minor)*100 + (patch)))

#endif
