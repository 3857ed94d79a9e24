#!/usr/bin/env bash
# Becomes a host: run inside `unshare --net --pid --fork --mount --uts --mount-proc --kill-child`.
# usage: host.sh NAME ADDRESS LAB PACKAGES SOURCE INTERPRETER
#
# Its own network, processes, /tmp, /run, /dev/shm and home folder; sshd in the foreground. It sees the
# machine's /usr, the folder PACKAGES (site-packages of the tests' environment), INTERPRETER (the prefix
# of the Python that they run on) and SOURCE (the checkout).
set -euo pipefail
NAME=$1 ADDRESS=$2 LAB=$3 PACKAGES=$4 SOURCE=$5 INTERPRETER=$6
OWN=$LAB/$NAME

hostname "$NAME"
ip link set lo up
mount --make-rprivate /
mkdir -p "$OWN"/{tmp,home/.ssh,home/bin}
cp "$LAB/id.pub" "$OWN/home/.ssh/authorized_keys"
cp "$LAB/id" "$OWN/home/.ssh/id"
chmod 700 "$OWN/home" "$OWN/home/.ssh"
mount -t overlay overlay -o "lowerdir=$LAB/packages/usr:/usr" /usr
cp /etc/passwd "$OWN/passwd"
grep -q ^sshd: "$OWN/passwd" || echo 'sshd:x:120:65534::/run/sshd:/usr/sbin/nologin' >>"$OWN/passwd"
mount --bind "$OWN/passwd" /etc/passwd
# As on an installed host: its own name does not have to be asked of a name server, and there is none.
printf '127.0.0.1 localhost\n%s %s\n' "$ADDRESS" "$NAME" >"$OWN/hosts"
mount --bind "$OWN/hosts" /etc/hosts
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd
chmod 755 /run/sshd
mount -t tmpfs tmpfs /dev/shm
# What lies under /tmp or /root must stay visible under its own name.
for kept in "$PACKAGES" "$SOURCE" "$INTERPRETER" "$LAB"; do
    case $kept in
    /tmp/*) mkdir -p "$OWN$kept" && mount --bind "$kept" "$OWN$kept" ;;
    /root/*) mkdir -p "$OWN/home/${kept#/root/}" && mount --bind "$kept" "$OWN/home/${kept#/root/}" ;;
    esac
done
mount --rbind "$OWN/home" /root
mount --rbind "$OWN/tmp" /tmp
ssh-keygen -q -t ed25519 -N '' -f /run/hostkey
until ip addr show eth0 2>/dev/null | grep -q "$ADDRESS"; do sleep 0.1; done
exec /usr/sbin/sshd -f /dev/null -D -e -h /run/hostkey -p 22 \
    -o UsePAM=no -o PidFile=none -o PasswordAuthentication=no -o PermitRootLogin=yes \
    -o StrictModes=no -o "ListenAddress=$ADDRESS" \
    -o "SetEnv=PATH=$INTERPRETER/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
