// An NVTX tool (NVTX_INJECTION64_PATH) that prints the names of the ranges that a program opens.
#include <nvtx3/nvToolsExt.h>

#include <cstdio>
#include <cstring>

namespace {

const char* Text(const nvtxEventAttributes_t* event) {
  if (event->messageType == NVTX_MESSAGE_TYPE_ASCII) return event->message.ascii;
  if (event->messageType == NVTX_MESSAGE_TYPE_REGISTERED)
    return reinterpret_cast<const char*>(event->message.registered);
  return "?";
}
nvtxDomainHandle_t CreateDomain(const char* name) { return reinterpret_cast<nvtxDomainHandle_t>(strdup(name)); }
nvtxStringHandle_t RegisterString(nvtxDomainHandle_t, const char* text) {
  return reinterpret_cast<nvtxStringHandle_t>(strdup(text));
}
int PushInDomain(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* event) {
  std::printf("NVTX %s: %s\n", domain ? reinterpret_cast<const char*>(domain) : "", Text(event));
  return 0;
}
int Push(const nvtxEventAttributes_t* event) { return PushInDomain(nullptr, event); }
int PushText(const char* text) {
  std::printf("NVTX : %s\n", text);
  return 0;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get) {
  const auto* const callbacks = static_cast<const NvtxExportTableCallbacks*>(get(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned size = 0;
  const auto set = [&](int id, auto* function) {
    if (static_cast<unsigned>(id) < size) *table[id] = reinterpret_cast<NvtxFunctionPointer>(function);
  };
  if (!callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) return 0;
  set(NVTX_CBID_CORE2_DomainCreateA, CreateDomain);
  set(NVTX_CBID_CORE2_DomainRegisterStringA, RegisterString);
  set(NVTX_CBID_CORE2_DomainRangePushEx, PushInDomain);
  if (!callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size)) return 0;
  set(NVTX_CBID_CORE_RangePushEx, Push);
  set(NVTX_CBID_CORE_RangePushA, PushText);
  return 1;
}
