// Endpoints of libfabric for the host: opened, told of peers, and given to a NIC.
#include "../hosts/fabric_queues.h"

#include <cerrno>
#include <cstring>
#include <string>

namespace moe {
namespace {

// Of this thread.
std::string& LastFabricError() {
    thread_local std::string text;
    return text;
}

struct FabricHandle {
    FabricHandle(const FabricDescription& given, uint64_t num_ranks, uint64_t lost_after_ns, const FabricApi& loaded)
        : api(loaded), endpoints(api, given, num_ranks), queues(endpoints, lost_after_ns) {}

    const FabricApi api;
    FabricEndpoints endpoints;
    FabricQueues queues;
};

void Load(FabricApi& api, const char* library) {
    if (const std::string why = api.Load(library); !why.empty()) throw FabricError(why);
}

}  // namespace
}  // namespace moe

extern "C" {

// What the last of these functions has said that failed on this thread.
const char* moe_fabric_error() { return moe::LastFabricError().c_str(); }

// Null if there can be none.
moe::FabricHandle* moe_fabric_open(const char* library, const moe::FabricDescription* given, uint64_t num_ranks,
                                   uint64_t lost_after_ns) {
    try {
        moe::FabricApi api;
        moe::Load(api, library);
        return new moe::FabricHandle(*given, num_ranks, lost_after_ns, api);
    } catch (const std::exception& error) {
        moe::LastFabricError() = error.what();
    }
    return nullptr;
}

// 0, or -1 where there can be no endpoint for a rank; `busy` says whether it is for want of a port.
int moe_fabric_listen(moe::FabricHandle* handle, uint32_t rank, const moe::FabricDescription* given, uint64_t* busy) {
    *busy = 0;
    try {
        handle->endpoints.Listen(rank, *given);
        return 0;
    } catch (const moe::FabricError& error) {
        moe::LastFabricError() = error.what();
        *busy = error.code == EADDRINUSE ? 1 : 0;
    } catch (const std::exception& error) {
        moe::LastFabricError() = error.what();
    }
    return -1;
}

// 0, or -1 where the library has not the provider that is described.
int moe_fabric_has(const char* library, const moe::FabricDescription* given) {
    try {
        moe::FabricApi api;
        moe::Load(api, library);
        moe::FabricEndpoints::Check(api, *given);
        return 0;
    } catch (const std::exception& error) {
        moe::LastFabricError() = error.what();
        return -1;
    }
}

// Has a rank use the endpoint of another one.
void moe_fabric_share(moe::FabricHandle* handle, uint32_t rank, uint32_t other) {
    handle->endpoints.Share(rank, other);
}

// What a rank has to be told. 0, or -1 where the provider does not say it.
int moe_fabric_address(const moe::FabricHandle* handle, uint32_t rank, moe::FabricAddress* address) {
    try {
        *address = handle->endpoints.Address(rank);
        return 0;
    } catch (const std::exception& error) {
        moe::LastFabricError() = error.what();
        return -1;
    }
}

// 0, or -1 where this is no address of the provider. Before a NIC uses it.
int moe_fabric_connect(moe::FabricHandle* handle, uint32_t rank, const moe::FabricAddress* address) {
    try {
        handle->endpoints.Connect(rank, *address);
        return 0;
    } catch (const std::exception& error) {
        moe::LastFabricError() = error.what();
        return -1;
    }
}

// For `NicDescription.others`.
moe::OtherHosts* moe_fabric_queues(moe::FabricHandle* handle) { return &handle->queues; }

// Bytes that its rank has written to ranks of other hosts. From any thread.
uint64_t moe_fabric_written(const moe::FabricHandle* handle) { return handle->queues.WrittenBytes(); }

// When no NIC uses it any more.
void moe_fabric_close(moe::FabricHandle* handle) { delete handle; }

}  // extern "C"
