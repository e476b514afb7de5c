// SPDX-License-Identifier: Apache-2.0
// rows.h on the CPU, on torch's own threads.
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>

#include "rows.h"

namespace {

// Elements of work that are worth another thread.
constexpr int64_t GRAIN = 32768;

template <class T>
T sum(T a, T b) {
  return static_cast<T>(static_cast<float>(a) + static_cast<float>(b));
}

template <class T>
void one_row(const Rows<T>& rows, int64_t token) {
  const T* value = rows.stream + token * rows.stream_stride;
  if (rows.table) {
    const T* vector = rows.table + rows.slots[token] * rows.table_stride;
    T* out = rows.out + token * rows.hidden;
    for (int64_t i = 0; i < rows.hidden; ++i) {
      out[i] = sum(value[i], vector[i]);
    }
    value = out;
  }
  if (!rows.arena || rows.dest[token] < 0) {
    return;
  }
  T* place = rows.arena + rows.dest[token] * rows.arena_stride;
  if (!rows.addend) {
    std::copy_n(value, rows.hidden, place);
    return;
  }
  const T* addend = rows.addend + token * rows.addend_stride;
  for (int64_t i = 0; i < rows.hidden; ++i) {
    place[i] = sum(addend[i], value[i]);
  }
}

}  // namespace

template <class T>
void run_on_cpu(const Rows<T>& rows) {
  const int64_t grain = GRAIN / rows.hidden + 1;
  torch::stable::parallel_for(0, rows.tokens, grain, [&rows](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      one_row(rows, token);
    }
  });
}

template void run_on_cpu(const Rows<float>&);
template void run_on_cpu(const Rows<torch::headeronly::BFloat16>&);
template void run_on_cpu(const Rows<torch::headeronly::Half>&);
