#!/usr/bin/env bash
# A throw-away Slurm cluster on this machine: one login node and a few compute nodes, real daemons, no containers.
#
#   cluster.sh start DIR [NODES]     start it, or whatever part of it is down; NODES defaults to 2
#   cluster.sh run   DIR COMMAND...  run COMMAND on the login node, as in: cluster.sh run DIR sbatch job.sbatch
#   cluster.sh crash DIR NODE        kill a compute node with all its processes; start brings it back
#   cluster.sh stop  DIR             end everything; logs and spool stay in DIR
#
# Needs root and Debian 12's Slurm packages, which it installs when they are missing; it exits with 3 when this machine
# cannot do that. Everything lives in namespaces below one process: the login node has its own network, host name,
# /etc/hosts and process ids, and so has each compute node inside it, with its own /dev/shm; the other file systems are
# the machine's, so all nodes share them. Hence several clusters do not meet, and ending that one process leaves nothing
# behind. What they cannot show: GPUs, cgroup limits, node-local /tmp, users other than root.
set -euo pipefail

SELF=$(realpath "${BASH_SOURCE[0]}")
readonly SELF
readonly NETWORK=10.99.0 LOGIN_ADDRESS=10.99.0.254
readonly PACKAGES=(slurmctld slurmd slurm-client munge libpmix2 iproute2)
readonly START_LIMIT_S=60 SLURMD_PORT=6818

main() {
  (($# >= 2)) || die "usage: cluster.sh start|run|crash|stop DIR ..."
  local -r verb=$1 dir=$(realpath --canonicalize-missing "$2")
  shift 2
  case $verb in
    start) cluster::start "$dir" "${1:-2}" ;;
    run) cluster::run "$dir" "$@" ;;
    crash) cluster::crash "$dir" "$1" ;;
    stop) cluster::stop "$dir" ;;
    _login) login::init "$dir" ;;
    _daemons) login::start_daemons "$dir" "$1" ;;
    _node) node::init "$dir" "$1" ;;
    *) die "unknown verb $verb; expected start, run, crash or stop" ;;
  esac
}

die() {
  echo "cluster.sh: $*" >&2
  exit 1
}

# This machine cannot run a cluster, whatever the caller does.
cannot() {
  echo "cluster.sh: $*" >&2
  exit 3
}

# wait_for SECONDS COMMAND...: until COMMAND succeeds
wait_for() {
  local -r end=$((SECONDS + $1))
  shift
  until "$@"; do
    ((SECONDS < end)) || return 1
    sleep 0.05
  done
}

# ---- from outside ----------------------------------------------------------------------------------------------------

cluster::start() {
  local -r dir=$1 nodes=$2
  [[ $nodes =~ ^[1-9][0-9]?$ ]] || die "NODES=$nodes: expected 1 to 99"
  ((EUID == 0)) || cannot "needs root: it makes namespaces and network links"
  packages::install
  mkdir -p "$dir"/{etc,log,munge,run,spool,state}
  chmod 700 "$dir/munge"
  exec {lock}>"$dir/lock"
  flock "$lock"
  if cluster::is_up "$dir"; then
    config::has_nodes "$dir" "$nodes" || die "the cluster in $dir has another number of nodes than $nodes; stop it first"
  else
    rm -rf "$dir"/{run,spool,state}/* # node states and pids of an earlier life
    config::write "$dir" "$nodes"
    cluster::start_login "$dir" {lock}>&-
  fi
  cluster::run "$dir" bash "$SELF" _daemons "$dir" "$nodes" {lock}>&-
  echo "cluster.sh: $nodes nodes are up" >&2
}

cluster::start_login() {
  local -r dir=$1
  setsid unshare --net --uts --mount --pid --fork --kill-child \
    bash "$SELF" _login "$dir" </dev/null >"$dir/log/login.out" 2>&1 &
  if ! wait_for 10 cluster::is_up "$dir"; then
    kill -KILL "$!" 2>/dev/null || true
    cannot "no login node; this machine seems to forbid namespaces: $(<"$dir/log/login.out")"
  fi
}

# The login node's first process is known by its pid and, since pids are used again, by its pid namespace.
cluster::is_up() {
  local pid namespace
  [[ -s $1/run/login ]] && read -r pid namespace <"$1/run/login" && [[ $(readlink "/proc/$pid/ns/pid") == "$namespace" ]]
}

cluster::run() {
  local -r dir=$1
  shift
  cluster::is_up "$dir" || die "no cluster runs in $dir"
  local pid _
  read -r pid _ <"$dir/run/login"
  SLURM_CONF=$dir/etc/slurm.conf nsenter --target "$pid" --net --uts --mount --pid env --chdir="$PWD" -- "$@"
}

cluster::crash() {
  local -r dir=$1 node=$2
  [[ -s $dir/run/$node ]] || die "no node $node in $dir"
  cluster::run "$dir" kill -KILL "$(<"$dir/run/$node")"
}

cluster::stop() {
  local -r dir=$1
  cluster::is_up "$dir" || return 0
  local pid _
  read -r pid _ <"$dir/run/login"
  kill -KILL "$pid" # the first process of a pid namespace takes all others with it
  wait_for 30 cluster::is_down "$dir" || die "process $pid does not end"
}

cluster::is_down() {
  ! cluster::is_up "$1"
}

packages::install() {
  local missing=() package
  for package in "${PACKAGES[@]}"; do
    [[ $(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
  done
  if ((${#missing[@]})); then
    command -v apt-get >/dev/null || cannot "needs Debian's packages ${missing[*]}, and this machine has no apt-get"
    echo "cluster.sh: installing ${missing[*]}" >&2
    packages::apt_get "${missing[@]}" >&2 || cannot "apt-get cannot install ${missing[*]}"
  fi
  # Slurm's pmix plugin opens the name that only libpmix-dev ships
  local -r libraries=/usr/lib/$(uname -m)-linux-gnu/pmix2/lib
  [[ -e $libraries/libpmix.so ]] || ln -s libpmix.so.2 "$libraries/libpmix.so"
}

packages::apt_get() ( # a subshell, so that the trap is its own
  policy=/usr/sbin/policy-rc.d
  if [[ ! -e $policy ]]; then # else the packages would start daemons of their own
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy"
  fi
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
)

config::has_nodes() {
  local -r dir=$1 nodes=$2
  (($(grep -c '^NodeName=' "$dir/etc/slurm.conf") == nodes))
}

config::write() {
  local -r dir=$1 nodes=$2
  local k
  {
    echo "127.0.0.1 localhost"
    echo "$LOGIN_ADDRESS login"
    for ((k = 1; k <= nodes; k++)); do echo "$NETWORK.$k node$k"; done
  } >"$dir/etc/hosts"
  echo "CgroupPlugin=cgroup/v1" >"$dir/etc/cgroup.conf" # v2, the default, needs systemd; nothing here uses cgroups
  (umask 077 && head -c 128 /dev/urandom >"$dir/munge/key")
  {
    config::slurm "$dir"
    for ((k = 1; k <= nodes; k++)); do
      echo "NodeName=node$k NodeAddr=$NETWORK.$k CPUs=8 RealMemory=64000 State=UNKNOWN"
    done
    echo "PartitionName=main Nodes=ALL Default=YES MaxTime=1-0"
  } >"$dir/etc/slurm.conf"
}

# cred_expire delays a requeued job, two minutes by default; TmpFS is per node since the pmix plugin makes a directory
# of a fixed name in it.
config::slurm() {
  local -r dir=$1
  cat <<CONF
ClusterName=test
SlurmctldHost=login($LOGIN_ADDRESS)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/run/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdSpoolDir=$dir/spool/%n
SlurmdPidFile=$dir/run/slurmd.%n.pid
SlurmdLogFile=$dir/log/slurmd.%n.log
SlurmdParameters=config_overrides
TmpFS=$dir/spool/%n.tmp
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
SlurmdTimeout=10
KillWait=5
MinJobAge=3600
CONF
}

# ---- on the login node -----------------------------------------------------------------------------------------------

login::init() {
  local -r dir=$1
  local pid _
  read -r pid _ </proc/self/stat # the machine's /proc still, so the pid is the one seen from outside
  local -r namespace=$(readlink "/proc/$pid/ns/pid")
  mount -t proc proc /proc
  mount --bind "$dir/etc/hosts" /etc/hosts
  hostname login
  ip link set lo up
  ip link add cluster type bridge
  ip address add "$LOGIN_ADDRESS/24" dev cluster
  ip link set cluster up
  echo "$pid $namespace" >"$dir/run/login.new"
  mv "$dir/run/login.new" "$dir/run/login"
  while [[ -e $dir/run/login ]]; do # a cluster whose directory is removed ends
    sleep 2 &
    wait "$!" # bash also reaps the daemons, which become its children
  done
}

login::start_daemons() {
  local -r dir=$1 nodes=$2
  process::is_alive "$dir/run/munged.pid" munged ||
    munged --key-file="$dir/munge/key" --seed-file="$dir/munge/seed" --socket="$dir/run/munge.socket" --force \
      --pid-file="$dir/run/munged.pid" --log-file="$dir/log/munged.log" --num-threads=2
  wait_for 10 munge --no-input --socket="$dir/run/munge.socket" --output=/dev/null || die "munged: $(tail -n 3 "$dir/log/munged.log")"
  process::is_alive "$dir/run/slurmctld.pid" slurmctld ||
    slurmctld </dev/null >"$dir/log/slurmctld.out" 2>&1 || die "slurmctld: $(tail -n 3 "$dir/log/slurmctld.out")"
  local k
  for ((k = 1; k <= nodes; k++)); do
    process::is_alive "$dir/run/node$k" bash || login::start_node "$dir" "$k"
  done
  wait_for "$START_LIMIT_S" login::nodes_are_idle "$nodes" ||
    die "after $START_LIMIT_S s: $(sinfo --Node --long 2>&1; tail -n 5 "$dir"/log/slurm*.log)"
}

login::start_node() {
  local -r dir=$1 k=$2
  mkdir -p "$dir/spool/node$k" "$dir/spool/node$k.tmp"
  ip link delete "port$k" 2>/dev/null || true # a crashed node's, if the kernel has not yet removed it
  setsid unshare --net --uts --mount bash "$SELF" _node "$dir" "$k" </dev/null >"$dir/log/node$k.out" 2>&1 &
  # slurmctld goes on believing in a crashed node for a while, so the state of the node would not do
  wait_for 10 login::node_answers "$k" || die "node$k: $(<"$dir/log/node$k.out") $(tail -n 3 "$dir/log/slurmd.node$k.log")"
}

login::node_answers() {
  (exec 3<>"/dev/tcp/$NETWORK.$1/$SLURMD_PORT") 2>/dev/null
}

login::nodes_are_idle() {
  local -r nodes=$1
  local states
  states=$(sinfo --noheader --Node --format=%t) || return 1
  (($(grep -cx 'idle\|mix\|alloc\|comp' <<<"$states") == nodes))
}

process::is_alive() {
  local -r file=$1 name=$2
  [[ -s $file && $(cat "/proc/$(<"$file")/comm" 2>/dev/null) == "$name" ]]
}

# ---- on a compute node -----------------------------------------------------------------------------------------------

node::init() {
  local -r dir=$1 k=$2
  hostname "node$k"
  mount -t tmpfs tmpfs /dev/shm
  ip link set lo up
  ip link add eth0 type veth peer name "port$k" netns 1 # 1: the login node's first process
  nsenter --net=/proc/1/ns/net ip link set "port$k" master cluster up
  ip address add "$NETWORK.$k/24" dev eth0
  ip link set eth0 up
  # shellcheck disable=SC2016
  exec unshare --pid --fork --kill-child bash -euc '
    read -r pid _ </proc/self/stat # as the login node sees it
    echo "$pid" >"$1/run/$2"
    mount -t proc proc /proc
    slurmd -D -N "$2" # not exec: bash reaps what slurmd leaves
  ' bash "$dir" "node$k"
}

main "$@"
