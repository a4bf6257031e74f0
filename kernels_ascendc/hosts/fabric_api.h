// libfabric, loaded where it is used. Its objects have their functions in tables, which the headers of 1.17 call; these
// few are in the library itself, each under the version of the ABI that it has had since then.
//
// A newer library has newer versions beside these, with larger records: never look up a name without its version.
#pragma once

#include <dlfcn.h>

#include <string>

#include <rdma/fabric.h>

namespace moe {

class FabricApi {
public:
    // Empty, or why it cannot be used.
    std::string Load(const char* path) {
        library_ = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        // Of this thread alone, in glibc.
        if (library_ == nullptr) return dlerror();  // NOLINT(concurrency-mt-unsafe)
        Find("fi_getinfo", "FABRIC_1.3", get_info);
        Find("fi_freeinfo", "FABRIC_1.3", free_info);
        Find("fi_dupinfo", "FABRIC_1.3", copy_info);
        Find("fi_fabric", "FABRIC_1.1", open_fabric);
        Find("fi_strerror", "FABRIC_1.0", error_text);
        Find("fi_version", "FABRIC_1.0", version);
        return missing_;
    }

    int (*get_info)(uint32_t, const char*, const char*, uint64_t, const fi_info*, fi_info**) = nullptr;
    void (*free_info)(fi_info*) = nullptr;
    fi_info* (*copy_info)(const fi_info*) = nullptr;
    int (*open_fabric)(fi_fabric_attr*, fid_fabric**, void*) = nullptr;
    const char* (*error_text)(int) = nullptr;
    uint32_t (*version)() = nullptr;

private:
    template <typename Function>
    void Find(const char* name, const char* of_version, Function& function) {
        function = reinterpret_cast<Function>(dlvsym(library_, name, of_version));
        if (function == nullptr && missing_.empty()) {
            missing_ = std::string("it has no ") + name + " of " + of_version;
        }
    }

    // Never closed: providers leave threads and handlers behind.
    void* library_ = nullptr;
    std::string missing_;
};

}  // namespace moe
