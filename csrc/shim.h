// SPDX-License-Identifier: Apache-2.0
// Calls of torch's C interface; its own macro for this has another name in every version.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/util/Exception.h>

inline void must(AOTITorchError code) {
  STD_TORCH_CHECK(code == 0, "pilot: a call of torch's C interface failed");
}
