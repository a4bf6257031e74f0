// Both sides of a doorbell.
#include "doorbell.h"
#include "memory.h"

using moe::emulation::Doorbell;

extern "C" {

void ring(Doorbell* bell) { bell->Ring(1); }
uint64_t count(Doorbell* bell) { return bell->count.load(); }
void sleep_until(Doorbell* bell, uint64_t wanted) { bell->SleepUntil(wanted); }
void copy_in_order(uint8_t* to, const uint8_t* from) { moe::emulation::CopyInOrder(to, from, 32); }
}
