// SPDX-License-Identifier: Apache-2.0
// rows.h on CUDA: an access is of 16 bytes where all rows are aligned, else of one element.
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>

#include "rows.h"
#include "shim.h"

namespace {

constexpr int64_t VECTOR_BYTES = 16;
// Above this many tokens a block of the capture kernel looks at several: most want nothing, and
// more blocks than the GPU holds at once would cost more than what they do.
constexpr int64_t MANY_TOKENS = 1024;
constexpr int TOKENS_A_BLOCK = 8;
constexpr int CAPTURE_THREADS = 256;

template <class T, int V>
struct alignas(sizeof(T) * V) Vec {
  T at[V];
};

template <class T, int V>
__device__ Vec<T, V> load(const T* row, int64_t column) {
  return reinterpret_cast<const Vec<T, V>*>(row)[column];
}

template <class T, int V>
__device__ void store(T* row, int64_t column, const Vec<T, V>& value) {
  reinterpret_cast<Vec<T, V>*>(row)[column] = value;
}

template <class T, int V>
__device__ Vec<T, V> sum(Vec<T, V> a, const Vec<T, V>& b) {
#pragma unroll
  for (int i = 0; i < V; ++i) {
    a.at[i] = static_cast<T>(static_cast<float>(a.at[i]) + static_cast<float>(b.at[i]));
  }
  return a;
}

// One block per token; a thread takes one vector of columns at a time.
template <class T, int V, bool CAPTURE>
__global__ void steer_kernel(const Rows<T> rows) {
  const int64_t token = blockIdx.x;
  const int64_t slot = rows.slots[token];
  const int64_t place = CAPTURE ? rows.dest[token] : -1;
  const T* stream = rows.stream + token * rows.stream_stride;
  const T* vector = rows.table + slot * rows.table_stride;
  T* out = rows.out + token * rows.hidden;
  const int64_t columns = rows.hidden / V;
  for (int64_t c = threadIdx.x; c < columns; c += blockDim.x) {
    Vec<T, V> value = sum(load<T, V>(stream, c), load<T, V>(vector, c));
    store(out, c, value);
    if (CAPTURE && place >= 0) {
      if (rows.addend) {
        value = sum(load<T, V>(rows.addend + token * rows.addend_stride, c), value);
      }
      store(rows.arena + place * rows.arena_stride, c, value);
    }
  }
}

// One block per TOKENS tokens: all places are read first, because each read waits for memory.
template <class T, int V, int TOKENS>
__global__ void capture_kernel(const Rows<T> rows) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * TOKENS;
  int32_t places[TOKENS];
#pragma unroll
  for (int i = 0; i < TOKENS; ++i) {
    places[i] = first + i < rows.tokens ? rows.dest[first + i] : -1;
  }
  const int64_t columns = rows.hidden / V;
#pragma unroll
  for (int i = 0; i < TOKENS; ++i) {
    if (places[i] < 0) {
      continue;
    }
    const T* stream = rows.stream + (first + i) * rows.stream_stride;
    T* arena = rows.arena + places[i] * rows.arena_stride;
    for (int64_t c = threadIdx.x; c < columns; c += blockDim.x) {
      Vec<T, V> value = load<T, V>(stream, c);
      if (rows.addend) {
        value = sum(load<T, V>(rows.addend + (first + i) * rows.addend_stride, c), value);
      }
      store(arena, c, value);
    }
  }
}

template <class T>
bool aligned(const T* rows, int64_t stride) {
  return reinterpret_cast<uintptr_t>(rows) % VECTOR_BYTES == 0 &&
      stride * sizeof(T) % VECTOR_BYTES == 0;
}

template <class T, int V>
void launch(const Rows<T>& rows, cudaStream_t stream) {
  const auto tokens = static_cast<unsigned>(rows.tokens);
  const int64_t warps = (rows.hidden / V + 31) / 32;
  if (rows.table) {
    const int threads = static_cast<int>(std::min<int64_t>(warps * 32, 1024));
    if (rows.arena) {
      steer_kernel<T, V, true><<<tokens, threads, 0, stream>>>(rows);
    } else {
      steer_kernel<T, V, false><<<tokens, threads, 0, stream>>>(rows);
    }
    return;
  }
  const int threads = static_cast<int>(std::min<int64_t>(warps * 32, CAPTURE_THREADS));
  if (rows.tokens > MANY_TOKENS) {
    const unsigned blocks = (tokens + TOKENS_A_BLOCK - 1) / TOKENS_A_BLOCK;
    capture_kernel<T, V, TOKENS_A_BLOCK><<<blocks, threads, 0, stream>>>(rows);
  } else {
    capture_kernel<T, V, 1><<<tokens, threads, 0, stream>>>(rows);
  }
}

}  // namespace

template <class T>
void run_on_cuda(const Rows<T>& rows, int32_t device) {
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream;
  must(aoti_torch_get_current_cuda_stream(device, &stream));
  constexpr int V = VECTOR_BYTES / sizeof(T);
  // A missing tensor is null with stride 0, and so aligned.
  const bool vectors = rows.hidden % V == 0 && aligned(rows.stream, rows.stream_stride) &&
      aligned(rows.addend, rows.addend_stride) && aligned(rows.table, rows.table_stride) &&
      aligned(rows.out, rows.hidden) && aligned(rows.arena, rows.arena_stride);
  if (vectors) {
    launch<T, V>(rows, static_cast<cudaStream_t>(stream));
  } else {
    launch<T, 1>(rows, static_cast<cudaStream_t>(stream));
  }
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, "pilot: ", cudaGetErrorString(error));
}

template void run_on_cuda(const Rows<float>&, int32_t);
template void run_on_cuda(const Rows<torch::headeronly::BFloat16>&, int32_t);
template void run_on_cuda(const Rows<torch::headeronly::Half>&, int32_t);
