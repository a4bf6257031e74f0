// A core's posts to the NIC of its rank.
#ifndef MOE_EMULATION_POSTING_H
#define MOE_EMULATION_POSTING_H

#include "meeting.h"
#include "nic.h"

namespace moe::emulation {

// False while the ring is full. See `Nic::Post`.
inline bool PostTo(Nic* nic, const Meeting& meeting, uint32_t block, const PostItem& item, bool reads_at_once = false) {
    if (nic == nullptr || !nic->HasQueue(item.rank)) throw CheckFailed("Post: that rank is not reached by a queue");
    if (!nic->Holds(item)) throw CheckFailed("Post: from outside of the out part, or to outside of a peer's in part");
    if (!nic->Claim(item.rank, meeting.launch, block)) throw CheckFailed("Post: two cores of a launch on one queue");
    return nic->Post(item, reads_at_once);
}

}  // namespace moe::emulation

#endif  // MOE_EMULATION_POSTING_H
