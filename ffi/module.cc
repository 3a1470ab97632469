// The Python interface to one half of jaxops: compiled once as jaxops/_cpu and once, with JAXOPS_CUDA, as jaxops/_cuda.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "core/handler.h"
#include "rows/plan.h"

namespace nb = nanobind;
namespace rows = jaxops::rows;

// See PlanRows in rows/plan.h.
static nb::dict PlanRows(int64_t row_count, int64_t columns, const std::string& elements, bool across, bool packs,
                         bool aligned_packs, bool single_elements, bool one_axis, bool alike, int inputs,
                         int parameters, int options, bool as_f32, int sums, int fetched, int capability,
                         int most_cluster) {
  using rows::Elements;
  const rows::RowProblem problem = {
      .rows = row_count,
      .columns = columns,
      .elements = elements == "bfloat16"  ? Elements::kBfloat16
                  : elements == "float16" ? Elements::kFloat16
                  : elements == "float32" ? Elements::kFloat32
                  : elements == "float64" ? Elements::kFloat64
                                          : Elements::kAny,
      .across = across,
      .packs = packs,
      .aligned_packs = aligned_packs,
      .single_elements = single_elements,
      .one_axis = one_axis,
      .alike = alike,
      .inputs = inputs,
      .parameters = parameters,
      .options = static_cast<rows::Options>(options),
      .as_f32 = as_f32,
      .sums = sums,
  };
  const rows::RowDevice device = {.capability = capability, .most_cluster = most_cluster};
  rows::RowPlan plan;
  rows::RowProblem summed = problem;
  summed.inputs = fetched;
  if (sums && !across) plan = rows::PlanSums(summed, device);
  if (plan.kernel == rows::Kernel::kNone) plan = rows::PlanRows(problem, device);
  plan = rows::TriedOr(plan);
  nb::dict out;
  out["kernel"] = rows::NameOf(plan.kernel);
  out["packs"] = plan.packs;
  out["lanes"] = plan.lanes;
  out["cluster"] = plan.cluster;
  out["elements"] = plan.elements;
  out["any_dtype"] = plan.any;
  out["layout"] = plan.layout == rows::Layout::kPlain     ? "plain"
                  : plan.layout == rows::Layout::kShifted ? "shifted"
                                                          : "general";
  out["text"] = rows::Describe(plan);
  if (sums) out["chunks"] = rows::PlanChunks(summed);
  return out;
}

// See TriedOr in rows/plan.h. If there is no such kernel, it returns false and the chosen plans apply.
static bool TryPlan(const std::string& kernel, int packs, int lanes, int cluster) {
  rows::tried_plan = {};
  for (int k = 0; k < static_cast<int>(rows::Kernel::kNone); ++k) {
    const auto each = static_cast<rows::Kernel>(k);
    if (kernel == rows::NameOf(each)) rows::tried_plan = {each, rows::Layout::kPlain, false, packs, lanes, cluster};
  }
  return rows::tried_plan.kernel != rows::Kernel::kNone;
}

#ifdef JAXOPS_CUDA
NB_MODULE(_cuda, m) {
#else
NB_MODULE(_cpu, m) {
#endif
  m.def(
      "targets",
      [] {
        nb::dict targets;
        for (const auto& [name, handler] : jaxops::RegisteredHandlers())
          targets[nb::str(name.data(), name.size())] = nb::capsule(reinterpret_cast<void*>(handler));
        return targets;
      },
      "Maps each kernel's name to the capsule of its FFI handler.");
  m.def("plan_rows", &PlanRows, nb::kw_only(), nb::arg("rows"), nb::arg("columns"), nb::arg("elements") = "float32",
        nb::arg("across") = false, nb::arg("packs") = true, nb::arg("aligned_packs") = true,
        nb::arg("single_elements") = true, nb::arg("one_axis") = true, nb::arg("alike") = true, nb::arg("inputs") = 1,
        nb::arg("parameters") = 0, nb::arg("options") = 0, nb::arg("as_f32") = false, nb::arg("sums") = 0,
        nb::arg("fetched") = 2, nb::arg("capability") = 90, nb::arg("most_cluster") = 16,
        "The kernel for rows on a GPU, and its numbers: RowProblem and RowPlan in ffi/rows/plan.h.");
  m.def("plan_segments", &rows::PlanSegments, "Into how many segments rows are split: ffi/rows/plan.h.");
  m.def("try_plan", &TryPlan, nb::arg("kernel") = "", nb::arg("packs") = 0, nb::arg("lanes") = 1,
        nb::arg("cluster") = 1, "Every call takes this plan in place of the chosen one, until it is called again.");
  m.attr("jaxlib_headers") = JAXOPS_JAXLIB_HEADERS;
  m.attr("cuda_architectures") = JAXOPS_CUDA_ARCHITECTURES;
}
