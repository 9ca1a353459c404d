# Starts Ceph's RADOS Gateway in DIR on 127.0.0.1:PORT, all daemons in the background.
#   KEY_ID=... KEY_SECRET=... bash rgw.sh DIR PORT MONITOR_PORT [FRONTEND OPTIONS]
# It ends when the gateway answers; the process ids are in DIR/run/*.pid.
set -eu
D=$(realpath -m "$1"); P=$2; M=$3; mkdir -p "$D"/{mon,mgr,osd,run,log,rgw}; cd "$D"
[ -f fsid ] || cat /proc/sys/kernel/random/uuid > fsid
cat > ceph.conf <<C
[global]
fsid = $(cat fsid)
mon initial members = a
mon host = [v2:127.0.0.1:$M]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
public network = 127.0.0.0/8
ms bind ipv6 = false
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd crush chooseleaf type = 0
mon allow pool size one = true
mon data avail crit = 1
osd objectstore = bluestore
bluestore block size = 8589934592
osd memory target = 939524096
mon data = $D/mon
mgr data = $D/mgr
osd data = $D/osd
keyring = $D/keyring
log file = $D/log/\$name.log
run dir = $D/run
admin socket = $D/run/\$name.asok
pid file = $D/run/\$name.pid
C
export CEPH_CONF=$D/ceph.conf
if [ ! -f keyring ]; then
  ceph-authtool -C keyring --gen-key -n mon. --cap mon 'allow *'
  ceph-authtool keyring --gen-key -n client.admin --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *'
  ceph-authtool keyring --gen-key -n mgr.x --cap mon 'allow profile mgr' --cap osd 'allow *'
  ceph-authtool keyring --gen-key -n osd.0 --cap mon 'allow profile osd' --cap osd 'allow *' --cap mgr 'allow profile osd'
  ceph-authtool keyring --gen-key -n client.rgw.a --cap mon 'allow rw' --cap osd 'allow rwx' --cap mgr 'allow rw'
  monmaptool --create --fsid "$(cat fsid)" --addv a "[v2:127.0.0.1:$M]" monmap
  ceph-mon -i a --mkfs --monmap monmap --keyring keyring
fi
ceph-mon -i a; ceph-mgr -i x
if [ ! -f osd/type ]; then u=$(cat /proc/sys/kernel/random/uuid); ceph osd new "$u"; ceph-osd -i 0 --mkfs --osd-uuid "$u"; fi
ceph-osd -i 0
timeout 90 radosgw -n client.rgw.a --keyring "$D/keyring" --rgw-data "$D/rgw" --rgw-frontends "beast endpoint=127.0.0.1:$P ${4:-}"
for i in $(seq 300); do (echo > "/dev/tcp/127.0.0.1/$P") 2>/dev/null && break; sleep 0.2; done
[ -f user ] || radosgw-admin user create --uid=kv --display-name=kv --access-key="$KEY_ID" --secret="$KEY_SECRET" > user
