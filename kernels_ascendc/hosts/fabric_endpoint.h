// One rank's endpoints of libfabric: writes to the windows of ranks on other hosts, and word of theirs to this one.
//
// Each of these ranks has an endpoint of its own here, which is closed when nothing of that rank is to come any more;
// or all share one, where an endpoint takes much. Used by one thread. The order of writes to a rank holds between
// messages, and not inside of them.
#pragma once

#include <poll.h>

#include <sys/uio.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include "fabric_api.h"

namespace moe {

struct FabricDescription {
    const char* provider;   // "tcp", "tcp;ofi_rxm"
    const char* interface;  // address of this host that peers reach it by
    const char* port;       // of an endpoint; "0": any
    uint64_t window;        // of this rank, what peers write and what it posts, in one piece
    uint64_t window_bytes;
    uint64_t in_bytes;  // the part that peers write
    uint64_t key;       // that they name it by; some providers make their own
};

// What a peer has to be told of this rank.
struct FabricAddress {
    static constexpr size_t LONGEST = 64;

    uint8_t name[LONGEST];
    uint64_t name_bytes;
    uint64_t key;
    uint64_t base;  // where offsets of its window count from
    uint64_t in_bytes;
};

class FabricError : public std::runtime_error {
public:
    explicit FabricError(const std::string& text, int64_t code = 0) : std::runtime_error(text), code(code) {}

    const int64_t code;  // of libfabric; 0: none
};

// What `fid` objects of libfabric are closed by, in the order opposite to that of their making.
template <typename Object>
class Opened {
public:
    Opened() = default;
    Opened(const Opened&) = delete;
    Opened& operator=(const Opened&) = delete;
    ~Opened() { Close(); }

    // False where it stays open.
    bool Close() {
        if (object_ != nullptr && fi_close(&object_->fid) != 0) return false;
        object_ = nullptr;
        return true;
    }

    Object** Out() { return &object_; }
    Object* Get() const { return object_; }
    fid* Id() const { return &object_->fid; }

private:
    Object* object_ = nullptr;
};

class FabricEndpoints {
public:
    static constexpr size_t MOST_PIECES = 4;

    // Of a rank that nobody reaches yet: see `Listen`.
    FabricEndpoints(const FabricApi& api, const FabricDescription& given, uint64_t num_ranks)
        : api_(api), window_(given.window), in_bytes_(given.in_bytes), info_(Choose(api, given)), peers_(num_ranks) {
        Require(api.open_fabric(info_->fabric_attr, fabric_.Out(), nullptr), "fi_fabric");
        Require(fi_domain(fabric_.Get(), info_.get(), domain_.Out(), nullptr), "fi_domain");
        Register(given);
        Require(fi_control(completions_.Id(), FI_GETWAIT, &descriptor_), "FI_GETWAIT");
    }

    FabricEndpoints(const FabricEndpoints&) = delete;
    FabricEndpoints& operator=(const FabricEndpoints&) = delete;

    ~FabricEndpoints() {
        // What is registered ends before its memory can be anything else.
        for (Peer& peer : peers_) peer.endpoint.Close();
        out_.Close();
        in_.Close();
        completions_.Close();
        names_.Close();
        domain_.Close();
        fabric_.Close();
    }

    // From now on a peer may write here, once it knows the address that is for it.
    void Listen(uint32_t rank, const FabricDescription& given) {
        const Info info = Choose(api_, given);
        Opened<fid_ep>& endpoint = peers_.at(rank).endpoint;
        Require(fi_endpoint(domain_.Get(), info.get(), endpoint.Out(), nullptr), "fi_endpoint");
        try {
            Require(fi_ep_bind(endpoint.Get(), names_.Id(), 0), "fi_ep_bind");
            Require(fi_ep_bind(endpoint.Get(), completions_.Id(), FI_TRANSMIT | FI_RECV), "fi_ep_bind");
            Require(fi_enable(endpoint.Get()), "fi_enable");
        } catch (...) {
            endpoint.Close();
            throw;
        }
    }

    // The same by the endpoint of another rank, which knows the same address.
    void Share(uint32_t rank, uint32_t other) { peers_.at(rank).by = &peers_.at(other).endpoint; }

    // Nothing of a peer comes any more, nor goes there. False where the library does not let go of it. Not of one that
    // shares its endpoint.
    bool Close(uint32_t rank) { return peers_[rank].endpoint.Close(); }

    // For one peer.
    FabricAddress Address(uint32_t rank) const {
        FabricAddress address{};
        size_t bytes = FabricAddress::LONGEST;
        Require(fi_getname(peers_.at(rank).By().Id(), address.name, &bytes), "fi_getname");
        address.name_bytes = bytes;
        address.key = fi_mr_key(in_.Get());
        address.base = HasMode(FI_MR_VIRT_ADDR) ? window_ : 0;
        address.in_bytes = in_bytes_;
        return address;
    }

    void Connect(uint32_t rank, const FabricAddress& address) {
        Peer& peer = peers_.at(rank);
        if (address.in_bytes != in_bytes_) {
            throw FabricError("its window takes " + std::to_string(address.in_bytes) +
                              " bytes of its peers, and this one's " + std::to_string(in_bytes_));
        }
        if (fi_av_insert(names_.Get(), address.name, 1, &peer.at, 0, nullptr) != 1) {
            throw FabricError("fi_av_insert: rank " + std::to_string(rank) + " has no address of this provider");
        }
        peer.key = address.key;
        peer.base = address.base;
    }

    enum class Started : uint8_t { YES, NOT_NOW, NEVER };

    // A part of a write: bytes of this rank's window, and where they go in the peer's.
    struct Piece {
        const uint8_t* from;
        uint64_t offset;
        uint64_t bytes;
    };

    uint64_t NumRanks() const { return peers_.size(); }

    // How many pieces one write can have.
    size_t MostPieces() const {
        return std::min({MOST_PIECES, info_->tx_attr->iov_limit, info_->tx_attr->rma_iov_limit});
    }

    // Starts a write to a peer's window, and tells it of so many flags in it. `Poll` names its context.
    Started Write(uint32_t rank, const Piece* pieces, size_t number, uint32_t flags, void* context) {
        const Peer& peer = peers_[rank];
        iovec local[MOST_PIECES];
        fi_rma_iov remote[MOST_PIECES];
        void* registered[MOST_PIECES];
        for (size_t i = 0; i < number; ++i) {
            local[i] = {const_cast<uint8_t*>(pieces[i].from), pieces[i].bytes};
            remote[i] = {peer.base + pieces[i].offset, pieces[i].bytes, peer.key};
            registered[i] = HasMode(FI_MR_LOCAL) ? fi_mr_desc(out_.Get()) : nullptr;
        }
        const fi_msg_rma message{local, registered, number, peer.at, remote, number, context, flags};
        const ssize_t result = fi_writemsg(peer.By().Get(), &message, flags == 0 ? 0 : FI_REMOTE_CQ_DATA);
        if (result == 0) return Started::YES;
        return result == -FI_EAGAIN ? Started::NOT_NOW : Started::NEVER;
    }

    // Calls `written(context, error)` for each write that has ended, and `told(flags)` for those of peers that say so.
    // False where nothing will ever come any more.
    template <typename Written, typename Told>
    bool Poll(Written&& written, Told&& told) {
        fi_cq_data_entry entries[ENTRIES];
        for (;;) {
            const ssize_t number = fi_cq_read(completions_.Get(), entries, ENTRIES);
            if (number == -FI_EAGAIN || number == 0) return true;
            if (number == -FI_EAVAIL) {
                fi_cq_err_entry failed{};
                if (fi_cq_readerr(completions_.Get(), &failed, 0) == 1) written(failed.op_context, failed.err);
                continue;
            }
            if (number < 0) return false;
            for (ssize_t i = 0; i < number; ++i) {
                if ((entries[i].flags & FI_REMOTE_CQ_DATA) != 0) {
                    told(static_cast<uint32_t>(entries[i].data));
                } else {
                    written(entries[i].op_context, 0);
                }
            }
        }
    }

    // What is readable when `Poll` has something, once `MaySleep` has said so.
    int Descriptor() const { return descriptor_; }

    bool MaySleep() {
        fid* all[] = {completions_.Id()};
        return fi_trywait(fabric_.Get(), all, 1) == FI_SUCCESS;
    }

    const char* Provider() const { return info_->fabric_attr->prov_name; }

    // Whether there is such a provider on that interface. Throws what keeps it from being used.
    static void Check(const FabricApi& api, const FabricDescription& given) { Choose(api, given); }

private:
    static constexpr size_t ENTRIES = 64;
    static constexpr size_t QUEUED = 4096;  // completions

    struct Peer {
        const Opened<fid_ep>& By() const { return by == nullptr ? endpoint : *by; }

        Opened<fid_ep> endpoint;
        const Opened<fid_ep>* by = nullptr;  // another rank's
        fi_addr_t at = FI_ADDR_UNSPEC;
        uint64_t key = 0;
        uint64_t base = 0;
    };

    bool HasMode(int mode) const { return (info_->domain_attr->mr_mode & mode) != 0; }

    void Require(int64_t result, const char* what) const {
        if (result >= 0) return;
        throw FabricError(std::string(what) + ": " + api_.error_text(static_cast<int>(-result)), -result);
    }

    using Info = std::unique_ptr<fi_info, void (*)(fi_info*)>;

    static Info Choose(const FabricApi& api, const FabricDescription& given) {
        const Info wanted(api.copy_info(nullptr), api.free_info);
        if (wanted == nullptr) throw FabricError("fi_allocinfo: no memory");
        wanted->caps = FI_RMA;
        wanted->ep_attr->type = FI_EP_RDM;
        wanted->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_VIRT_ADDR;
        wanted->domain_attr->threading = FI_THREAD_DOMAIN;
        // The usual is a thread of the library's own.
        wanted->domain_attr->data_progress = FI_PROGRESS_MANUAL;
        wanted->domain_attr->control_progress = FI_PROGRESS_MANUAL;
        wanted->domain_attr->cq_data_size = sizeof(uint32_t);
        wanted->tx_attr->msg_order = FI_ORDER_WAW;
        wanted->rx_attr->msg_order = FI_ORDER_WAW;
        // The library frees it with the rest.
        wanted->fabric_attr->prov_name = strdup(given.provider);
        fi_info* found = nullptr;
        const int result =
            api.get_info(FI_VERSION(1, 17), given.interface, given.port, FI_SOURCE, wanted.get(), &found);
        Info info(found, api.free_info);
        if (result < 0) throw FabricError(std::string("fi_getinfo: ") + api.error_text(-result), -result);
        if (info->ep_attr->max_order_waw_size < given.window_bytes) {
            throw FabricError("writes of this provider keep their order only up to " +
                              std::to_string(info->ep_attr->max_order_waw_size) + " bytes");
        }
        return info;
    }

    void Register(const FabricDescription& given) {
        fi_av_attr names{};
        names.type = FI_AV_TABLE;
        Require(fi_av_open(domain_.Get(), &names, names_.Out(), nullptr), "fi_av_open");
        fi_cq_attr completions{};
        completions.format = FI_CQ_FORMAT_DATA;
        completions.wait_obj = FI_WAIT_FD;
        completions.size = QUEUED;
        Require(fi_cq_open(domain_.Get(), &completions, completions_.Out(), nullptr), "fi_cq_open");
        // Peers can write where they are to write, and nowhere else in this process.
        void* const window = reinterpret_cast<void*>(given.window);
        Require(fi_mr_reg(domain_.Get(), window, given.in_bytes, FI_REMOTE_WRITE, 0, given.key, 0, in_.Out(), nullptr),
                "fi_mr_reg");
        if (HasMode(FI_MR_LOCAL)) {
            Require(
                fi_mr_reg(domain_.Get(), window, given.window_bytes, FI_WRITE, 0, ~given.key, 0, out_.Out(), nullptr),
                "fi_mr_reg");
        }
    }

    const FabricApi& api_;
    const uint64_t window_;
    const uint64_t in_bytes_;
    Info info_;
    Opened<fid_fabric> fabric_;
    Opened<fid_domain> domain_;
    Opened<fid_av> names_;
    Opened<fid_cq> completions_;
    Opened<fid_mr> in_, out_;
    std::vector<Peer> peers_;
    int descriptor_ = -1;
};

}  // namespace moe
