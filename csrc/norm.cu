// SPDX-License-Identifier: Apache-2.0
// Candidate: residual add, steering, RMSNorm and capture in one pass over the rows.
//
//     residual[i] = hidden[i] + (residual[i] + table[slots[i]])
//     hidden[i] = residual[i] / sqrt(mean(residual[i]^2) + epsilon) * weight
//     arena[dest[i]] = residual[i]                                   if dest[i] >= 0
//
// Measured by benchmarks/kernels.py against the separate steps. Nothing calls it: decoders call
// their norm themselves, between two calls of the tap.
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>

#include "shim.h"

namespace {

using T = torch::headeronly::BFloat16;
using torch::stable::Tensor;

constexpr int V = 8;
constexpr int MAX_THREADS = 1024;
constexpr int PER_THREAD = 2;  // vectors of a row that a thread keeps: up to 16384 columns

struct alignas(16) Vec {
  T at[V];
};

__device__ Vec at(const T* row, int column) {
  return reinterpret_cast<const Vec*>(row)[column];
}

__device__ float block_sum(float value) {
  __shared__ float warps[32];
  for (int step = 16; step; step /= 2) {
    value += __shfl_xor_sync(~0u, value, step);
  }
  if (threadIdx.x % 32 == 0) {
    warps[threadIdx.x / 32] = value;
  }
  __syncthreads();
  value = threadIdx.x % 32 < blockDim.x / 32 ? warps[threadIdx.x % 32] : 0.0f;
  for (int step = 16; step; step /= 2) {
    value += __shfl_xor_sync(~0u, value, step);
  }
  return value;
}

__global__ void norm_kernel(
    T* hidden_rows,
    T* residual_rows,
    const T* table,
    const int32_t* slots,
    const T* weight,
    float epsilon,
    T* arena,
    const int32_t* dest,
    int hidden) {
  const int64_t token = blockIdx.x;
  const T* vector = table + slots[token] * static_cast<int64_t>(hidden);
  const int64_t place = dest[token];
  T* hidden_row = hidden_rows + token * hidden;
  T* residual_row = residual_rows + token * hidden;
  const int columns = hidden / V;
  Vec kept[PER_THREAD];
  float squares = 0.0f;
#pragma unroll
  for (int k = 0; k < PER_THREAD; ++k) {
    const int c = threadIdx.x + k * blockDim.x;
    if (c < columns) {
      const Vec h = at(hidden_row, c), r = at(residual_row, c), v = at(vector, c);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const T steered = static_cast<T>(static_cast<float>(r.at[i]) + static_cast<float>(v.at[i]));
        kept[k].at[i] = static_cast<T>(static_cast<float>(h.at[i]) + static_cast<float>(steered));
        const float value = static_cast<float>(kept[k].at[i]);
        squares += value * value;
      }
      reinterpret_cast<Vec*>(residual_row)[c] = kept[k];
      if (place >= 0) {
        reinterpret_cast<Vec*>(arena + place * hidden)[c] = kept[k];
      }
    }
  }
  const float scale = rsqrtf(block_sum(squares) / hidden + epsilon);
#pragma unroll
  for (int k = 0; k < PER_THREAD; ++k) {
    const int c = threadIdx.x + k * blockDim.x;
    if (c < columns) {
      const Vec w = at(weight, c);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const float normed = static_cast<float>(kept[k].at[i]) * scale;
        kept[k].at[i] = static_cast<T>(normed * static_cast<float>(w.at[i]));
      }
      reinterpret_cast<Vec*>(hidden_row)[c] = kept[k];
    }
  }
}

template <class U>
U* data(const Tensor& t) {
  return static_cast<U*>(t.mutable_data_ptr());
}

void steered_norm(
    Tensor hidden,
    Tensor residual,
    Tensor table,
    Tensor slots,
    Tensor weight,
    double epsilon,
    Tensor arena,
    Tensor dest) {
  for (const Tensor* t : {&hidden, &residual, &table, &weight, &arena}) {
    STD_TORCH_CHECK(
        t->is_contiguous() && t->scalar_type() == torch::headeronly::ScalarType::BFloat16,
        "steered_norm: contiguous bfloat16 only");
  }
  const int64_t tokens = hidden.size(0), columns = hidden.size(1) / V;
  STD_TORCH_CHECK(
      hidden.size(1) % V == 0 && columns <= MAX_THREADS * PER_THREAD,
      "steered_norm: hidden size");
  const int32_t device = hidden.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream;
  must(aoti_torch_get_current_cuda_stream(device, &stream));
  const int64_t wanted = (columns + 31) / 32 * 32;
  norm_kernel<<<
      static_cast<unsigned>(tokens),
      static_cast<int>(wanted < MAX_THREADS ? wanted : MAX_THREADS),
      0,
      static_cast<cudaStream_t>(stream)>>>(
      data<T>(hidden), data<T>(residual), data<T>(table), data<int32_t>(slots), data<T>(weight),
      static_cast<float>(epsilon), data<T>(arena), data<int32_t>(dest),
      static_cast<int>(hidden.size(1)));
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, "pilot: ", cudaGetErrorString(error));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pilot, m) {
  m.def(
      "steered_norm(Tensor(a!) hidden, Tensor(b!) residual, Tensor table, Tensor slots, "
      "Tensor weight, float epsilon, Tensor(c!) arena, Tensor dest) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(pilot, CUDA, m) {
  m.impl("steered_norm", TORCH_BOX(&steered_norm));
}
